-- What the control's tables contradict themselves in; no row is proof. `$1` is the number of transactions that pgbench counted.
SELECT fault FROM (VALUES
    ('events differ from the transactions that were counted', (SELECT count(*) FROM events) <> $1::bigint),
    ('postings are not two for each event', (SELECT count(*) FROM postings) <> 2 * $1::bigint),
    ('outbox rows are not one for each event', (SELECT count(*) FROM outbox) <> $1::bigint),
    ('heads do not add up to the events', (SELECT sum(sequence) FROM users) <> $1::bigint),
    ('money was made or lost', (SELECT sum(amount) FROM balances) <> 100000000 * (SELECT count(*) FROM balances))
) AS checks (fault, found) WHERE found;
