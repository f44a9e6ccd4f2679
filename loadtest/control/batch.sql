-- The same work for many events at once, the way group commit does it: one statement a step, arrays in, locks sorted, users before
-- balances. What it reaches is the ceiling of these tables on this machine. pgbench calls it, in a transaction of its own each time.
CREATE FUNCTION control_batch(size integer, users bigint, record text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    senders   bigint[];
    receivers bigint[];
    keys      text[];
BEGIN
    SELECT array_agg(sender), array_agg(1 + (sender - 1 + distance) % users), array_agg('load-' || key)
    INTO senders, receivers, keys
    FROM (SELECT 1 + floor(random() * users)::bigint AS sender, 1 + floor(random() * (users - 1))::bigint AS distance,
                 floor(random() * 9e15)::bigint::text AS key
          FROM generate_series(1, size)) AS drawn;
    PERFORM FROM users AS u WHERE u.user_no = ANY (senders) ORDER BY u.user_no FOR NO KEY UPDATE;
    PERFORM FROM balances AS b WHERE b.account_no = ANY (senders || receivers) AND b.asset = 'EUR/2'
    ORDER BY b.account_no, b.asset FOR NO KEY UPDATE;
    PERFORM FROM unnest(senders, keys) AS wanted (user_no, key)
    JOIN events AS e ON e.user_no = wanted.user_no AND e.writer = 'control' AND e.idempotency_key = wanted.key
        AND hashtextextended(e.idempotency_key, 0) = hashtextextended(wanted.key, 0)
        AND e.recorded_at > now() - interval '90 days' AND e.recorded_at < now() + interval '1 day';
    WITH clock AS MATERIALIZED (
        SELECT clock_timestamp() AS at
    ), batch AS MATERIALIZED (
        SELECT nextval('events_position_seq') AS position, sender, receiver, key, u.sequence + nth AS sequence, at
        FROM (SELECT sender, receiver, key, row_number() OVER (PARTITION BY sender) AS nth
              FROM unnest(senders, receivers, keys) AS drawn (sender, receiver, key)) AS numbered
        JOIN users AS u ON u.user_no = numbered.sender, clock
    ), event AS (
        INSERT INTO events (position, user_no, sequence, event_id, type, writer, idempotency_key, fingerprint, record,
                            recorded_at, effective_at)
        SELECT position, sender, sequence,
               (lpad(to_hex((extract(epoch FROM at) * 1000)::bigint), 12, '0') || substr(md5(key), 13))::uuid,
               'transfer', 'control', key, '\x9f86d081884c7d659a2feaa0c55ad0159f86d081884c7d659a2feaa0c55ad015'::bytea,
               control_batch.record, at, at
        FROM batch
    ), legs AS (
        INSERT INTO postings (position, leg, account_no, asset, amount, recorded_at)
        SELECT position, leg, account_no, 'EUR/2', amount, at
        FROM batch, LATERAL (VALUES (0::smallint, sender, -1), (1::smallint, receiver, 1)) AS l (leg, account_no, amount)
    )
    INSERT INTO outbox (position, shard, user_no, recorded_at)
    SELECT position, (sender % 16)::smallint, sender, at FROM batch;
    UPDATE users AS u
    SET sequence = u.sequence + events, last_at = clock_timestamp(),
        head_hash = '\x9f86d081884c7d659a2feaa0c55ad0159f86d081884c7d659a2feaa0c55ad015'::bytea
    FROM (SELECT sender, count(*) AS events FROM unnest(senders) AS sent (sender) GROUP BY sender) AS head
    WHERE u.user_no = head.sender;
    UPDATE balances AS b SET amount = b.amount + change
    FROM (SELECT account_no, sum(amount) AS change
          FROM (SELECT account_no, -1 AS amount FROM unnest(senders) AS paid (account_no)
                UNION ALL SELECT account_no, 1 FROM unnest(receivers) AS got (account_no)) AS legs
          GROUP BY account_no) AS net
    WHERE b.account_no = net.account_no AND b.asset = 'EUR/2';
END $$;
