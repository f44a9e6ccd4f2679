-- Partitions are made by these functions only. They run with the owner's rights, so the runtime role needs none, and with
-- a search_path of their own.

-- Makes the partition of `parent` for the month that begins at `month`, beside the table first, then attached: creating it as
-- PARTITION OF would lock the parent exclusively, behind any reader and before every writer. ATTACH takes SHARE UPDATE
-- EXCLUSIVE only, and the matching CHECK spares its scan. Returns whether there was anything to do.
CREATE FUNCTION make_partition(parent text, month timestamptz) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET lock_timeout = '2s' AS $$
DECLARE
    starts    timestamptz := date_trunc('month', month AT TIME ZONE 'UTC') AT TIME ZONE 'UTC';
    ends      timestamptz := (date_trunc('month', month AT TIME ZONE 'UTC') + interval '1 month') AT TIME ZONE 'UTC';
    lower     text := to_char(starts AT TIME ZONE 'UTC', 'YYYY-MM-DD') || ' 00:00:00+00';
    upper     text := to_char(ends AT TIME ZONE 'UTC', 'YYYY-MM-DD') || ' 00:00:00+00';
    partition text := parent || '_' || to_char(starts AT TIME ZONE 'UTC', 'YYYY_MM');
BEGIN
    IF parent NOT IN ('events', 'postings') THEN
        RAISE EXCEPTION '% is not partitioned', parent USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF abs(extract(epoch FROM starts - clock_timestamp())) > 400 * 86400 THEN
        RAISE EXCEPTION '% is more than a year away', lower USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF EXISTS (SELECT FROM pg_inherits i WHERE i.inhparent = to_regclass(parent) AND i.inhrelid = to_regclass(partition)) THEN
        RETURN false;
    END IF;
    -- A table of that name that is not attached is the rest of an interrupted attempt, or was detached by the owner.
    IF to_regclass(partition) IS NOT NULL THEN
        RAISE EXCEPTION '% exists but is not attached', partition USING ERRCODE = 'duplicate_table';
    END IF;
    EXECUTE format('CREATE TABLE %I (LIKE %I INCLUDING DEFAULTS INCLUDING CONSTRAINTS, CONSTRAINT %I CHECK (recorded_at >= %L AND recorded_at < %L))',
        partition, parent, partition || '_bounds', lower, upper);
    IF parent = 'events' THEN
        EXECUTE format('CREATE UNIQUE INDEX %I ON %I (position)', partition || '_position', partition);
        EXECUTE format('CREATE UNIQUE INDEX %I ON %I (user_no, sequence)', partition || '_user_sequence', partition);
    END IF;
    EXECUTE format('CREATE TRIGGER no_truncate BEFORE TRUNCATE ON %I FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()', partition);
    EXECUTE format('ALTER TABLE %I ATTACH PARTITION %I FOR VALUES FROM (%L) TO (%L)', parent, partition, lower, upper);
    RETURN true;
END $$;
REVOKE EXECUTE ON FUNCTION make_partition(text, timestamptz) FROM PUBLIC;
