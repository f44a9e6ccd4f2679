//! Reads the files of `schema/`: the shipped ones from the binary, an operator's from a directory.
//!
//! Runs once at start. Replaces nothing: a name that is there already is an error.

use super::Registry;
use super::declared::{AccountsFile, GuardEntry, TypeFile};
use super::effects::Assets;
use super::expression::Engine;
use super::kind::{EventType, Example, Folder, Wrong};
use crate::domain::{AccountPattern, Amount, Asset, Chart, Guard, Subject, TypeName, Version};
use jsonschema::PatternOptions;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// Longest file, in bytes.
const FILE_LENGTH_MAX: u64 = 1 << 20;

/// Most files of an operator's directory.
const FILES_MAX: usize = 10_000;

/// Most decimals of an asset.
const DECIMALS_MAX: u8 = 30;

/// A file that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadError {
    /// Which file, as a path below the directory; shipped files begin with `schema/`.
    pub file: String,
    /// Where in it, from 1, if the parser knows.
    pub line: Option<usize>,
    /// Why.
    pub reason: String,
}

impl std::fmt::Display for LoadError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.file)?;
        if let Some(line) = self.line {
            write!(f, ":{line}")?;
        }
        write!(f, ": {}", self.reason)
    }
}

impl std::error::Error for LoadError {}

fn wrong(file: impl Into<String>, reason: impl Into<String>) -> LoadError {
    LoadError {
        file: file.into(),
        line: None,
        reason: reason.into(),
    }
}

fn toml<T: DeserializeOwned>(file: &str, text: &str) -> Result<T, LoadError> {
    toml::from_str(text).map_err(|error| LoadError {
        file: file.to_owned(),
        line: error
            .span()
            .and_then(|span| text.get(..span.start))
            .map(|before| before.matches('\n').count() + 1),
        reason: error.message().trim().to_owned(),
    })
}

/// Files by their path below the root.
type Files = BTreeMap<String, String>;

fn shipped() -> Files {
    super::embedded::FILES
        .iter()
        .map(|(path, text)| ((*path).to_owned(), (*text).to_owned()))
        .collect()
}

fn read_directory(root: &Path, below: &str, files: &mut Files) -> Result<(), LoadError> {
    let failed =
        |error: std::io::Error| wrong(root.join(below).display().to_string(), error.to_string());
    for entry in std::fs::read_dir(root.join(below)).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry
            .file_name()
            .into_string()
            .map_err(|_| wrong(below, "a file name is not UTF-8"))?;
        // Kubernetes mounts have hidden folders beside the files they show; a README is for people.
        if name.starts_with('.') || name.ends_with(".md") {
            continue;
        }
        let path = if below.is_empty() {
            name
        } else {
            format!("{below}/{name}")
        };
        let meta = std::fs::metadata(entry.path()).map_err(failed)?;
        if meta.is_dir() {
            if path.matches('/').count() > 1 {
                return Err(wrong(path, "no folder belongs here"));
            }
            read_directory(root, &path, files)?;
            continue;
        }
        if meta.len() > FILE_LENGTH_MAX {
            return Err(wrong(path, "the file is longer than 1 MiB"));
        }
        if files.len() >= FILES_MAX {
            return Err(wrong(path, "there are too many files"));
        }
        let text = std::fs::read_to_string(entry.path())
            .map_err(|error| wrong(path.clone(), error.to_string()))?;
        files.insert(path, text);
    }
    Ok(())
}

/// All that was read so far.
#[derive(Default)]
struct Gathered {
    assets: Assets,
    patterns: Vec<(String, AccountPattern)>,
    folders: BTreeMap<TypeName, (String, Folder)>,
}

impl Gathered {
    /// Adds the files of one root. `prefix` begins the paths in errors.
    fn add(&mut self, prefix: &str, files: Files) -> Result<(), LoadError> {
        let mut folders: BTreeMap<TypeName, Folder> = BTreeMap::new();
        for (path, text) in files {
            let shown = format!("{prefix}{path}");
            match path.split('/').collect::<Vec<_>>()[..] {
                ["assets.toml"] => self.add_assets(&shown, &text)?,
                ["accounts.toml"] => self.add_accounts(&shown, &text)?,
                [folder, ref rest @ ..] if !rest.is_empty() => {
                    let name = TypeName::parse(folder)
                        .ok_or_else(|| wrong(shown.clone(), "the folder's name is no type name"))?;
                    if self.folders.contains_key(&name) {
                        return Err(wrong(shown, format!("there already is a type {name}")));
                    }
                    add_file(folders.entry(name).or_default(), &shown, rest, text)?;
                }
                _ => return Err(wrong(shown, "no such file belongs here")),
            }
        }
        let shown = |name: &TypeName| format!("{prefix}{name}");
        self.folders.extend(
            folders
                .into_iter()
                .map(|(name, folder)| (name.clone(), (shown(&name), folder))),
        );
        Ok(())
    }

    fn add_assets(&mut self, file: &str, text: &str) -> Result<(), LoadError> {
        for (code, decimals) in toml::<BTreeMap<String, u8>>(file, text)? {
            let named = (1..=16).contains(&code.len())
                && code.as_bytes()[0].is_ascii_uppercase()
                && code
                    .bytes()
                    .all(|b| b.is_ascii_uppercase() || b.is_ascii_digit() || b == b'_');
            if !named || decimals > DECIMALS_MAX {
                let reason = format!("{code:?} is no entry such as EUR = 2 (at most 30 decimals)");
                return Err(wrong(file, reason));
            }
            let asset = Asset::from_canonical(&format!("{code}/{decimals}"));
            if self.assets.insert(code.clone(), asset).is_some() {
                return Err(wrong(file, format!("there already is an asset {code}")));
            }
        }
        Ok(())
    }

    fn add_accounts(&mut self, file: &str, text: &str) -> Result<(), LoadError> {
        for entry in toml::<AccountsFile>(file, text)?.account {
            let named = |reason: &str| wrong(file, format!("{:?}: {reason}", entry.pattern));
            let guard = match (entry.guard, &entry.floor) {
                (GuardEntry::None, None) => Guard::None,
                (GuardEntry::Floor, Some(floor)) => {
                    Guard::Floor(Amount::parse(floor).map_err(|error| named(&error.to_string()))?)
                }
                (GuardEntry::None, Some(_)) => return Err(named("guard none has no floor")),
                (GuardEntry::Floor, None) => return Err(named("guard floor needs a floor")),
            };
            let pattern = AccountPattern::parse(&entry.pattern, guard, entry.opened_by_credit)
                .ok_or_else(|| named("is no pattern"))?;
            if self
                .patterns
                .iter()
                .any(|(known, _)| *known == entry.pattern)
            {
                return Err(named("is there already"));
            }
            self.patterns.push((entry.pattern, pattern));
        }
        Ok(())
    }
}

fn add_file(
    folder: &mut Folder,
    shown: &str,
    rest: &[&str],
    text: String,
) -> Result<(), LoadError> {
    match rest {
        ["type.toml"] => folder.file = Some(toml::<TypeFile>(shown, &text)?),
        ["examples", name] => {
            let (version, example) = example(name, text).ok_or_else(|| {
                wrong(
                    shown,
                    "an example is named <version>.<accepted|refused>.<name>.json",
                )
            })?;
            folder.examples.push((version, example));
        }
        [name] => {
            let version = name
                .strip_suffix(".json")
                .and_then(Version::parse)
                .ok_or_else(|| wrong(shown, "no such file belongs here"))?;
            folder.schemas.push(((*name).to_owned(), version, text));
        }
        _ => return Err(wrong(shown, "no such file belongs here")),
    }
    Ok(())
}

fn example(name: &str, text: String) -> Option<(Version, Example)> {
    let stem = name.strip_suffix(".json")?;
    let (at, accepted) = match (stem.find(".accepted."), stem.find(".refused.")) {
        (Some(at), None) => (at, true),
        (None, Some(at)) => (at, false),
        _ => return None,
    };
    let version = Version::parse(stem.get(..at)?)?;
    let name = stem.get(at + 1..)?.to_owned();
    let example = Example {
        name,
        accepted,
        text,
    };
    Some((version, example))
}

/// How every schema is compiled: offline, linear-time patterns, the ledger's formats enforced.
fn options(assets: &Arc<Assets>) -> jsonschema::ValidationOptions<'static> {
    let (spellings, codes) = (Arc::clone(assets), Arc::clone(assets));
    jsonschema::options()
        .with_draft(jsonschema::Draft::Draft202012)
        .offline()
        .with_pattern_options(PatternOptions::regex())
        .should_validate_formats(true)
        .should_ignore_unknown_formats(false)
        .with_format("asset", move |text| {
            super::effects::asset(&spellings, text).is_some()
        })
        .with_format("currency", move |text| codes.contains_key(text))
        .with_format("amount", |text| {
            Amount::parse(text).is_ok_and(|amount| amount > Amount::ZERO)
        })
        .with_format("amount_or_zero", |text| {
            Amount::parse(text).is_ok_and(|amount| !amount.is_negative())
        })
        .with_format("subject", |text| Subject::parse(text).is_some())
}

impl Registry {
    /// Reads the shipped types, assets and accounts, and adds an operator's from a directory of the same shape. An
    /// operator's examples are run; the shipped ones are run by the tests.
    ///
    /// # Errors
    /// [`LoadError`]: the first file that is wrong.
    pub fn load(directory: Option<&Path>) -> Result<Registry, LoadError> {
        let mut gathered = Gathered::default();
        gathered.add("schema/", shipped())?;
        let own: Vec<TypeName> = gathered.folders.keys().cloned().collect();
        if let Some(directory) = directory {
            let mut files = Files::new();
            read_directory(directory, "", &mut files)?;
            gathered.add("", files)?;
        }
        let registry = gathered.build()?;
        for kind in registry.types().filter(|kind| !own.contains(kind.name())) {
            for version in kind.versions() {
                for example in version.examples() {
                    registry
                        .run_example(kind, version, example)
                        .map_err(|reason| {
                            let (name, version) = (kind.name(), version.version());
                            let file = format!("{name}/examples/{version}.{}.json", example.name);
                            wrong(file, reason)
                        })?;
                }
            }
        }
        Ok(registry)
    }
}

impl Gathered {
    fn build(self) -> Result<Registry, LoadError> {
        let engine = Engine::new().map_err(|reason| wrong("expressions", reason))?;
        let assets = Arc::new(self.assets);
        let options = options(&assets);
        let mut types = BTreeMap::new();
        for (name, (shown, folder)) in self.folders {
            let kind = EventType::build(name.clone(), folder, &engine, &options).map_err(
                |(file, line, reason): Wrong| LoadError {
                    file: format!("{shown}/{file}"),
                    line,
                    reason,
                },
            )?;
            types.insert(name.as_str().to_owned(), kind);
        }
        let patterns = self.patterns.into_iter().map(|(_, pattern)| pattern);
        Ok(Registry {
            engine,
            assets,
            chart: Chart::new(patterns.collect()),
            types,
        })
    }
}
