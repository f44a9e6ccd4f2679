-- One transfer, one transaction, the way a service without group commit would write it: lock the sender, lock both balances in
-- order, look for the duplicate, write event, postings and outbox, move head and balances. pgbench fills in the variables; the record
-- is one of them, because pgbench would take an address in a literal for more of them.
-- It is spared what the service does besides: tokens, schemas, hashing, making the record. Ids rise with time, as a UUID v7 does.
\set sender random(1, :users)
\set receiver 1 + (:sender - 1 + random(1, :users - 1)) % :users
\set key random(1, 9000000000000000)
BEGIN;
SELECT sequence + 1 AS next, head_hash, last_at
FROM users WHERE user_no = :sender::bigint FOR NO KEY UPDATE \gset
SELECT account_no, amount
FROM balances WHERE account_no IN (:sender::bigint, :receiver::bigint) AND asset = 'EUR/2'
ORDER BY account_no, asset FOR NO KEY UPDATE;
SELECT event_id, fingerprint, record
FROM events WHERE user_no = :sender::bigint AND writer = 'control'
  AND hashtextextended(idempotency_key, 0) = hashtextextended('load-' || :key::text, 0) AND idempotency_key = 'load-' || :key::text
  AND recorded_at > now() - interval '90 days' AND recorded_at < now() + interval '1 day';
WITH clock AS MATERIALIZED (
    SELECT clock_timestamp() AS at
), event AS (
    INSERT INTO events (position, user_no, sequence, event_id, type, writer, idempotency_key, fingerprint, record,
                        recorded_at, effective_at)
    SELECT nextval('events_position_seq'), :sender::bigint, :next::bigint,
           (lpad(to_hex((extract(epoch FROM at) * 1000)::bigint), 12, '0') || substr(md5(:key::text), 13))::uuid,
           'transfer', 'control', 'load-' || :key::text,
           '\x9f86d081884c7d659a2feaa0c55ad0159f86d081884c7d659a2feaa0c55ad015'::bytea, :record::text, at, at
    FROM clock RETURNING position, user_no, recorded_at
), legs AS (
    INSERT INTO postings (position, leg, account_no, asset, amount, recorded_at)
    SELECT position, leg, account_no, 'EUR/2', amount, recorded_at
    FROM event, (VALUES (0::smallint, :sender::bigint, -1), (1::smallint, :receiver::bigint, 1)) AS l (leg, account_no, amount)
)
INSERT INTO outbox (position, shard, user_no, recorded_at)
SELECT position, (user_no % 16)::smallint, user_no, recorded_at FROM event;
UPDATE users
SET sequence = :next::bigint, last_at = clock_timestamp(),
    head_hash = '\x9f86d081884c7d659a2feaa0c55ad0159f86d081884c7d659a2feaa0c55ad015'::bytea
WHERE user_no = :sender::bigint;
UPDATE balances SET amount = amount + CASE account_no WHEN :sender::bigint THEN -1 ELSE 1 END
WHERE account_no IN (:sender::bigint, :receiver::bigint) AND asset = 'EUR/2';
COMMIT;
