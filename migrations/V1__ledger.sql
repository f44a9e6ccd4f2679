-- The ledger's tables. Every name is unqualified: search_path is the ledger's own schema, so many ledgers share a database.
-- Amounts are NUMERIC(38,0) minor units; times are microseconds in UTC; hashes are 32 bytes.

-- A user: the lock that orders his history, and its head. Here and in balances a page has room for more than two versions of each row
-- besides those that it was filled with: while somebody holds a snapshot, nothing dead makes room, and a version on another page costs
-- an entry in each index.
CREATE TABLE users (
    user_no   bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    subject   text COLLATE "C" NOT NULL CONSTRAINT users_subject_key UNIQUE,
    status    text NOT NULL DEFAULT 'active' CONSTRAINT users_status_known CHECK (status IN ('active', 'frozen')),
    sequence  bigint NOT NULL CONSTRAINT users_sequence_not_negative CHECK (sequence >= 0),
    head_hash bytea NOT NULL CONSTRAINT users_head_hash_length CHECK (octet_length(head_hash) = 32),
    last_at   timestamptz NOT NULL
) WITH (fillfactor = 30);

-- An account: an address and what the chart said of it when it was opened.
CREATE TABLE accounts (
    account_no bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    address    text COLLATE "C" NOT NULL CONSTRAINT accounts_address_key UNIQUE,
    owner      text COLLATE "C",
    guard      text NOT NULL CONSTRAINT accounts_guard_known CHECK (guard IN ('floor', 'none')),
    floor      numeric(38,0) CONSTRAINT accounts_floor_with_guard CHECK ((guard = 'floor') = (floor IS NOT NULL))
);
CREATE INDEX accounts_owner ON accounts (owner) WHERE owner IS NOT NULL;
-- Whose balances are folded; accounts with a floor, which may be millions, are not in it.
CREATE INDEX accounts_unlocked ON accounts (account_no) WHERE guard <> 'floor';

-- The balance of a `floor` account: the row that is locked and checked.
CREATE TABLE balances (
    account_no bigint NOT NULL,
    asset      text COLLATE "C" NOT NULL,
    amount     numeric(38,0) NOT NULL,
    CONSTRAINT balances_pkey PRIMARY KEY (account_no, asset)
) WITH (fillfactor = 30);

-- Drawn one by one (no cache), after the transaction has its id: see the safe horizon.
CREATE SEQUENCE events_position_seq CACHE 1;

-- The events. `record` is the exact text that was answered, hashed and published. In events, postings and outbox, columns of a fixed
-- width come first, the widest before the others: their rows have no padding.
CREATE TABLE events (
    position        bigint NOT NULL,
    user_no         bigint NOT NULL,
    sequence        bigint NOT NULL,
    recorded_at     timestamptz NOT NULL,
    effective_at    timestamptz NOT NULL,
    event_id        uuid NOT NULL,
    type            text COLLATE "C" NOT NULL,
    writer          text COLLATE "C" NOT NULL,
    idempotency_key text COLLATE "C" NOT NULL,
    fingerprint     bytea NOT NULL,
    record          text NOT NULL
) PARTITION BY RANGE (recorded_at);
-- Two more are made with each partition: its positions are unique, and so are the sequences of a user. A unique index of the whole would
-- have to hold recorded_at as well: a third larger, and of another time the same number would be another.
-- Holds a hash of the key: half the size. A hash can meet another's, so a look-up compares the key as well.
CREATE INDEX events_user_key ON events (user_no, hashtextextended(idempotency_key, 0));
CREATE INDEX events_event_id ON events (event_id);

CREATE TABLE postings (
    position    bigint NOT NULL,
    account_no  bigint NOT NULL,
    recorded_at timestamptz NOT NULL,
    leg         smallint NOT NULL,
    asset       text COLLATE "C" NOT NULL,
    amount      numeric(38,0) NOT NULL
) PARTITION BY RANGE (recorded_at);
CREATE INDEX postings_account ON postings (account_no, asset, position) INCLUDE (amount);

-- What is still to be published: points at the event, holds no copy of it.
CREATE TABLE outbox (
    position    bigint CONSTRAINT outbox_pkey PRIMARY KEY,
    user_no     bigint NOT NULL,
    recorded_at timestamptz NOT NULL,
    held_since  timestamptz,
    not_before  timestamptz,
    tries       integer NOT NULL DEFAULT 0,
    shard       smallint NOT NULL CONSTRAINT outbox_shard_range CHECK (shard BETWEEN 0 AND 15),
    redriven    boolean NOT NULL DEFAULT false,
    traceparent text
) WITH (fillfactor = 70);
CREATE INDEX outbox_shard_position ON outbox (shard, position);
-- A redriven row comes back below the floor that its shard is scanned from.
CREATE INDEX outbox_redriven ON outbox (position) WHERE redriven;
-- A row that is put off holds its user back and is left out of scans. These indexes are empty until there is one: only such rows
-- cost more than their HOT updates.
CREATE INDEX outbox_put_off_user ON outbox (user_no) WHERE not_before IS NOT NULL;
CREATE INDEX outbox_put_off_due ON outbox (not_before) WHERE not_before IS NOT NULL;
CREATE INDEX outbox_held ON outbox (held_since) WHERE held_since IS NOT NULL;

-- What could not be published; an operator redrives it.
CREATE TABLE outbox_parked (
    position    bigint CONSTRAINT outbox_parked_pkey PRIMARY KEY,
    user_no     bigint NOT NULL,
    recorded_at timestamptz NOT NULL,
    parked_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    reason      text NOT NULL,
    body        bytea NOT NULL
);

-- Business keys: taken for ever, or until `until_at`.
CREATE TABLE business_keys (
    namespace text COLLATE "C" NOT NULL,
    key       text COLLATE "C" NOT NULL,
    position  bigint NOT NULL,
    until_at  timestamptz,
    CONSTRAINT business_keys_pkey PRIMARY KEY (namespace, key)
);

-- All positions up to `position` are settled: no transaction can still commit one of them.
CREATE TABLE horizon (
    only_row   boolean CONSTRAINT horizon_pkey PRIMARY KEY DEFAULT true CONSTRAINT horizon_one_row CHECK (only_row),
    position   bigint NOT NULL,
    settled_at timestamptz NOT NULL
);
INSERT INTO horizon (position, settled_at) VALUES (0, clock_timestamp());

-- What the postings of an account that no write locks sum to, up to a position: one row per account, asset and day is kept, and
-- the latest is moved on. A cache, made from postings alone: delete it, and the keeper makes it anew. A sum of amounts may have
-- more digits than an amount.
CREATE TABLE balance_snapshots (
    account_no bigint NOT NULL,
    asset      text COLLATE "C" NOT NULL,
    day        date NOT NULL,
    position   bigint NOT NULL,
    amount     numeric(57,0) NOT NULL,
    CONSTRAINT balance_snapshots_pkey PRIMARY KEY (account_no, asset, day)
) WITH (fillfactor = 70);

-- How far all of them are: every posting up to `position` of an account that no write locks is in the snapshots, and no position
-- beyond it was drawn before `drawn_at`. So a reader need not look for a tail in older partitions.
CREATE TABLE snapshot_horizon (
    only_row   boolean CONSTRAINT snapshot_horizon_pkey PRIMARY KEY DEFAULT true CONSTRAINT snapshot_horizon_one_row CHECK (only_row),
    position   bigint NOT NULL,
    drawn_at   timestamptz NOT NULL,
    generation bigint NOT NULL
);
INSERT INTO snapshot_horizon (position, drawn_at, generation) VALUES (0, 'epoch', 0);

-- Whoever deletes a snapshot takes back what was claimed of all of them; a fold that is under way notices by the generation. The
-- schema is named: whoever does this by hand may have another ledger in the search path.
CREATE FUNCTION forget_snapshots() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE format('UPDATE %I.snapshot_horizon SET position = 0, drawn_at = ''epoch'', generation = generation + 1', TG_TABLE_SCHEMA);
    RETURN NULL;
END $$;
CREATE TRIGGER balance_snapshots_forgotten AFTER DELETE OR TRUNCATE ON balance_snapshots
    FOR EACH STATEMENT EXECUTE FUNCTION forget_snapshots();

-- Tokens that no longer count: one by issuer and id, or all of a subject's issued up to a moment.
CREATE TABLE revoked_tokens (
    issuer        text COLLATE "C" NOT NULL,
    token_id      text COLLATE "C",
    subject       text COLLATE "C",
    issued_before timestamptz,
    expires_at    timestamptz,
    revoked_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT revoked_tokens_one_kind CHECK (
        (token_id IS NOT NULL AND subject IS NULL AND issued_before IS NULL)
        OR (token_id IS NULL AND subject IS NOT NULL AND issued_before IS NOT NULL))
);
CREATE UNIQUE INDEX revoked_tokens_token ON revoked_tokens (issuer, token_id) WHERE token_id IS NOT NULL;
CREATE UNIQUE INDEX revoked_tokens_subject ON revoked_tokens (subject, issuer) WHERE subject IS NOT NULL;
