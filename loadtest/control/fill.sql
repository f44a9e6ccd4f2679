-- The control's users, each with one guarded account and money enough for any run. `:users` is replaced by their number.
-- Numbers are given, not drawn, so that the script can name the account of a user by the user's number.
INSERT INTO users (user_no, subject, sequence, head_hash, last_at) OVERRIDING SYSTEM VALUE
SELECT n, 'u-' || n, 0, sha256(n::text::bytea), clock_timestamp() FROM generate_series(1, :users) AS n;
INSERT INTO accounts (account_no, address, owner, guard, floor) OVERRIDING SYSTEM VALUE
SELECT n, 'users:u-' || n || ':available', 'u-' || n, 'floor', 0 FROM generate_series(1, :users) AS n;
INSERT INTO balances (account_no, asset, amount)
SELECT n, 'EUR/2', 100000000 FROM generate_series(1, :users) AS n;
-- The month that begins while it runs, too.
SELECT make_partition(parent, clock_timestamp() + months * interval '1 month')
FROM unnest(ARRAY['events', 'postings']) AS parent, generate_series(0, 1) AS months;
ANALYZE;
