//! The layout and the direction of the source, held by a test: what stays apart today stays apart.
//!
//! Reads files only; knows Rust no further than comments, strings and paths.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

/// What each module of the crate may import, bottom first. A module that is not here has no place yet.
const MAY_IMPORT: &[(&str, &[&str])] = &[
    ("domain", &[]),
    ("config", &[]),
    ("shutdown", &[]),
    ("telemetry", &["config"]),
    ("auth", BOTTOM),
    ("schema", BOTTOM),
    ("store", BELOW_STORE),
    ("commit", BELOW_COMMIT),
    ("http", BELOW_ROLES),
    ("relay", BELOW_ROLES),
    ("keeper", BELOW_ROLES),
    ("dev", BELOW_DEV),
];
const BOTTOM: &[&str] = &["domain", "config", "shutdown", "telemetry"];
const BELOW_STORE: &[&str] = &[
    "domain",
    "config",
    "shutdown",
    "telemetry",
    "auth",
    "schema",
];
const BELOW_COMMIT: &[&str] = &[
    "domain",
    "config",
    "shutdown",
    "telemetry",
    "auth",
    "schema",
    "store",
];
const BELOW_ROLES: &[&str] = &[
    "domain",
    "config",
    "shutdown",
    "telemetry",
    "auth",
    "schema",
    "store",
    "commit",
];
const BELOW_DEV: &[&str] = &[
    "domain",
    "config",
    "shutdown",
    "telemetry",
    "auth",
    "schema",
    "store",
    "commit",
    "http",
    "relay",
    "keeper",
];
/// These wire the roles together: they import everything and nothing imports them.
const TOP: &[&str] = &["main", "lib", "service", "cli"];

/// What reads a clock, draws at random, waits or does IO.
const IMPURE: &[&str] = &[
    "SystemTime",
    "Instant",
    "Timestamp::now",
    "Zoned::now",
    "rand::",
    "RandomState",
    "tokio",
    "std::fs",
    "std::net",
    "std::env",
    "std::io",
    "std::process",
    "std::thread",
    "async",
    "await",
];

/// First words of statements that read or change rows or tables.
const SQL: &[&str] = &[
    "SELECT ",
    "INSERT INTO ",
    "UPDATE ",
    "DELETE FROM ",
    "WITH ",
    "TRUNCATE ",
    "LOCK TABLE ",
    "CREATE ",
    "ALTER ",
    "DROP ",
    "GRANT ",
    "REVOKE ",
    "BEGIN",
    "COMMIT",
    "ROLLBACK",
    "SET ",
];
/// Of these, the ones that carry their name into the server's statistics.
const NAMED: usize = 7;

const FOLDERS: &[&str] = &[
    "docs",
    "examples",
    "k8s",
    "loadtest",
    "migrations",
    "proptest-regressions",
    "schema",
    "src",
    "tests",
    "target",
];

/// One file of the source, with what a reader of Rust sees in it.
struct Source {
    /// Path below the root, with slashes.
    path: String,
    text: String,
    /// Without comments, string contents and unit tests.
    code: String,
    /// String literals outside unit tests, as they are spelled.
    strings: Vec<String>,
}

impl Source {
    fn read(root: &Path, path: &Path) -> Self {
        let text = std::fs::read_to_string(path).unwrap();
        let shipped = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
        let (code, strings) = lex(shipped);
        let path = path
            .strip_prefix(root)
            .unwrap()
            .to_str()
            .unwrap()
            .replace('\\', "/");
        Source {
            path,
            text,
            code,
            strings,
        }
    }

    /// The module of the crate it belongs to; None outside `src`.
    fn module(&self) -> Option<&str> {
        let below = self.path.strip_prefix("src/")?;
        below
            .split('/')
            .next()
            .map(|name| name.trim_end_matches(".rs"))
    }

    /// Whether all of it is for tests: such modules are declared under `cfg(test)`.
    fn is_test(&self) -> bool {
        !self.path.starts_with("src/")
            || self.path.ends_with("_tests.rs")
            || self.path == "src/domain/properties.rs"
    }
}

/// Splits a source into code and string literals, and drops comments.
fn lex(text: &str) -> (String, Vec<String>) {
    let (mut code, mut strings) = (String::new(), Vec::new());
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let before = code.chars().next_back().unwrap_or(' ');
        let in_word = before.is_alphanumeric() || before == '_';
        let length = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            rest.find("*/").map_or(rest.len(), |end| end + 2)
        } else if let Some((open, end)) = raw_string(rest).filter(|_| !in_word) {
            strings.push(rest[open..end].trim_end_matches(['#', '"']).to_owned());
            end
        } else if first == '"' {
            let end = quoted(rest);
            strings.push(rest[1..end - 1].to_owned());
            end
        } else if first == '\'' && character(rest).is_some() {
            character(rest).unwrap()
        } else {
            code.push(first);
            first.len_utf8()
        };
        rest = &rest[length..];
    }
    (code, strings)
}

/// Start of the contents and end of a raw string, if one begins here.
fn raw_string(text: &str) -> Option<(usize, usize)> {
    let hashes = text
        .strip_prefix('r')?
        .bytes()
        .take_while(|b| *b == b'#')
        .count();
    let open = 2 + hashes;
    text[1 + hashes..].starts_with('"').then_some(())?;
    let close = format!("\"{}", "#".repeat(hashes));
    let end = text[open..].find(&close)?;
    Some((open, open + end + close.len()))
}

/// End of the string that begins here.
fn quoted(text: &str) -> usize {
    let mut escaped = false;
    for (index, byte) in text.bytes().enumerate().skip(1) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => return index + 1,
            _ => {}
        }
    }
    text.len()
}

/// End of the character literal that begins here; None for a lifetime.
fn character(text: &str) -> Option<usize> {
    let mut chars = text.char_indices().skip(1);
    match chars.next()?.1 {
        '\\' => text[3..].find('\'').map(|end| end + 4),
        _ => chars
            .next()
            .filter(|(_, c)| *c == '\'')
            .map(|(index, _)| index + 1),
    }
}

/// Whether the code has this, not as a part of a longer word.
fn has(code: &str, wanted: &str) -> bool {
    let word = |c: char| c.is_alphanumeric() || c == '_';
    code.match_indices(wanted).any(|(start, _)| {
        let open = !code[..start].chars().next_back().is_some_and(word);
        let close = wanted.ends_with(':')
            || !code[start + wanted.len()..]
                .chars()
                .next()
                .is_some_and(word);
        open && close
    })
}

/// First names of the paths below `crate::` and `super::`, groups in braces included.
fn imports(code: &str) -> Vec<(bool, String)> {
    let mut found = Vec::new();
    for (prefix, absolute) in [("crate::", true), ("super::", false)] {
        for (start, _) in code.match_indices(prefix) {
            let rest = &code[start + prefix.len()..];
            let names = rest
                .strip_prefix('{')
                .map_or_else(|| vec![rest], |group| members(group));
            for name in names {
                let word = |c: &char| c.is_alphanumeric() || *c == '_';
                found.push((
                    absolute,
                    name.trim_start().chars().take_while(word).collect(),
                ));
            }
        }
    }
    found
}

/// The members of a group, split at its own commas.
fn members(group: &str) -> Vec<&str> {
    let (mut depth, mut start, mut found) = (0, 0, Vec::new());
    for (index, c) in group.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => {
                found.push(&group[start..index]);
                break;
            }
            '}' => depth -= 1,
            ',' if depth == 0 => {
                found.push(&group[start..index]);
                start = index + 1;
            }
            _ => {}
        }
    }
    found
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn walk(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && !path.ends_with("target") {
            walk(&path, found);
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            found.push(path);
        }
    }
}

fn sources() -> Vec<Source> {
    let root = root();
    let mut paths = Vec::new();
    for folder in ["src", "tests", "loadtest"] {
        walk(&root.join(folder), &mut paths);
    }
    paths.sort();
    assert!(paths.len() > 20, "the source is not where this test looks");
    paths.iter().map(|path| Source::read(&root, path)).collect()
}

/// Fails with all that was found, one a line.
fn report(faults: &[String]) {
    assert!(faults.is_empty(), "\n{}\n", faults.join("\n"));
}

#[test]
fn every_file_says_what_it_is() {
    let bare = sources()
        .into_iter()
        .filter(|source| !source.text.starts_with("//! "));
    report(
        &bare
            .map(|source| format!("{} does not begin with //!", source.path))
            .collect::<Vec<_>>(),
    );
}

#[test]
fn imports_go_down_only() {
    let mut faults = Vec::new();
    for source in sources() {
        let Some(module) = source.module() else {
            continue;
        };
        if TOP.contains(&module) && !source.path.contains(&format!("{module}/")) {
            continue;
        }
        let Some((_, allowed)) = MAY_IMPORT.iter().find(|(name, _)| *name == module) else {
            faults.push(format!(
                "{}: the module {module} has no place in MAY_IMPORT",
                source.path
            ));
            continue;
        };
        for (absolute, name) in imports(&source.code) {
            let known =
                TOP.contains(&name.as_str()) || MAY_IMPORT.iter().any(|(other, _)| *other == name);
            // A path from `super` may name a part of the same module.
            let own = !absolute
                && ["", "/mod"]
                    .iter()
                    .any(|end| root().join(format!("src/{module}/{name}{end}.rs")).exists());
            if known && !own && name != module && !allowed.contains(&name.as_str()) {
                faults.push(format!("{} imports {name}; {module} may not", source.path));
            }
        }
    }
    report(&faults);
}

#[test]
fn libraries_stay_where_they_belong() {
    let mut faults = Vec::new();
    for source in sources().iter().filter(|source| !source.is_test()) {
        for (library, home) in [
            ("axum", "http"),
            ("lapin", "relay"),
            ("cel", "schema"),
            ("jsonwebtoken", "auth"),
        ] {
            if has(&source.code, &format!("{library}::")) && source.module() != Some(home) {
                faults.push(format!("{} uses {library}; only {home} may", source.path));
            }
        }
        if source.module() == Some("domain") {
            let impure = IMPURE.iter().filter(|name| has(&source.code, name));
            faults
                .extend(impure.map(|name| format!("{} uses {name}; domain is pure", source.path)));
        }
    }
    report(&faults);
}

#[test]
fn sql_is_in_store_and_has_a_name() {
    let mut faults = Vec::new();
    let mut names = HashSet::new();
    for source in sources().iter().filter(|source| !source.is_test()) {
        for text in source.strings.iter().map(|text| text.trim_start()) {
            let named = text
                .strip_prefix("-- ")
                .and_then(|rest| rest.split_once('\n'));
            let statement = named.map_or(text, |(_, statement)| statement.trim_start());
            let Some(kind) = SQL.iter().position(|word| statement.starts_with(word)) else {
                continue;
            };
            if source.module() != Some("store") {
                faults.push(format!("{}: SQL outside of store: {text:?}", source.path));
            } else if let Some((name, _)) = named {
                if !name
                    .bytes()
                    .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
                {
                    faults.push(format!(
                        "{}: {name:?} is no name of a statement",
                        source.path
                    ));
                }
                if !names.insert(name.to_owned()) {
                    faults.push(format!("{}: two statements are named {name}", source.path));
                }
            } else if kind < NAMED {
                faults.push(format!(
                    "{}: a statement without a name: {text:?}",
                    source.path
                ));
            }
        }
    }
    assert!(
        names.len() > 20,
        "the statements are not where this test looks"
    );
    report(&faults);
}

#[test]
fn nothing_is_left_for_later() {
    let later = [
        concat!("TO", "DO"),
        concat!("FIX", "ME"),
        concat!("to", "do!"),
        concat!("unimple", "mented!"),
        concat!("db", "g!"),
    ];
    let mut faults = Vec::new();
    for source in sources() {
        let left = later.iter().filter(|word| has(&source.text, word));
        faults.extend(left.map(|word| format!("{} has {word}", source.path)));
    }
    report(&faults);
}

#[test]
fn no_place_is_named_after_nothing() {
    let mut faults = Vec::new();
    for source in sources() {
        for part in source
            .path
            .split('/')
            .map(|part| part.trim_end_matches(".rs"))
        {
            if [
                "util", "utils", "common", "helper", "helpers", "misc", "shared",
            ]
            .contains(&part)
            {
                faults.push(format!("{}: {part} says nothing", source.path));
            }
        }
    }
    if root().join("src/error.rs").exists() {
        faults.push("src/error.rs: each module has its own errors".to_owned());
    }
    for entry in std::fs::read_dir(root()).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        if entry.path().is_dir() && !name.starts_with('.') && !FOLDERS.contains(&name.as_str()) {
            faults.push(format!("{name}/ has no place in the layout"));
        }
    }
    report(&faults);
}

#[test]
fn the_reader_of_sources_reads() {
    let text = "use crate::{store::{a, b}, http::c}; // \"no\" crate::dev\nlet x = \"a \\\" b\"; let y = r#\"raw\"#; let c = '\"';\n\
                fn f<'a>(x: &'a str) { super::relay::go(); } /* TO */ let z = '\\'';";
    let (code, strings) = lex(text);
    assert_eq!(strings, ["a \\\" b", "raw"]);
    assert!(!has(&code, "no") && !has(&code, "dev") && !has(&code, "TO") && has(&code, "relay"));
    let found: Vec<_> = imports(&code).into_iter().map(|(_, name)| name).collect();
    assert_eq!(found, ["store", "http", "relay"]);
}
