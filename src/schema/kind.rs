//! One event type: its versions, how old data becomes current data, and its effects.
//!
//! Knows nothing of requests or principals.

use super::FieldError;
use super::declared::{DistinctEntry, TypeFile, UpcastEntry};
use super::effects::{Assets, Compiler, Effects, data_path, is_code};
use super::expression::{Engine, Expression, Failure, Variables};
use super::request::escaped;
use crate::domain::{Asset, Scope, Subject, TypeName, Version};
use jsonschema::error::ValidationErrorKind;
use serde_json::{Map, Value};
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};

/// Most errors that one answer lists.
pub(super) const ERRORS_MAX: usize = 20;

/// An example of a version: a request, and what comes of it.
#[derive(Clone, Debug)]
pub struct Example {
    /// Its file's name without version and ending, such as `accepted.plain`.
    pub name: String,
    /// Whether the request is accepted.
    pub accepted: bool,
    /// The file: `{"request": ..., "expect": ...}`.
    pub text: String,
}

/// One version of a type's data.
#[derive(Debug)]
pub struct SchemaVersion {
    version: Version,
    text: String,
    schema: Value,
    validator: jsonschema::Validator,
    examples: Vec<Example>,
}

impl SchemaVersion {
    /// Which version.
    #[must_use]
    pub fn version(&self) -> Version {
        self.version
    }

    /// Its JSON Schema (2020-12), as the file has it.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Its JSON Schema.
    #[must_use]
    pub fn schema(&self) -> &Value {
        &self.schema
    }

    /// Its examples, by name.
    #[must_use]
    pub fn examples(&self) -> &[Example] {
        &self.examples
    }

    pub(super) fn accepts(&self, data: &Value) -> bool {
        self.validator.is_valid(data)
    }

    /// What is wrong with the data, at most [`ERRORS_MAX`] errors; never repeats the values that were sent.
    pub(super) fn errors(&self, data: &Value) -> Vec<FieldError> {
        self.validator
            .iter_errors(data)
            .flat_map(|error| field_errors(&error))
            .take(ERRORS_MAX)
            .collect()
    }
}

/// One error for each member it is about: a missing or unknown member is pointed to, not the object around it.
fn field_errors(error: &jsonschema::ValidationError<'_>) -> Vec<FieldError> {
    let pointer = format!("/data{}", error.instance_path());
    let of_member = |name: &str, detail: &str| FieldError {
        pointer: format!("{pointer}/{}", escaped(name)),
        detail: detail.to_owned(),
    };
    let (names, detail) = match error.kind() {
        ValidationErrorKind::AdditionalProperties { unexpected } => {
            (unexpected.clone(), "there is no such member")
        }
        ValidationErrorKind::Required { property } => (
            property.as_str().map(str::to_owned).into_iter().collect(),
            "the member is required",
        ),
        _ => (Vec::new(), ""),
    };
    if names.is_empty() {
        let detail = match error.kind() {
            ValidationErrorKind::Format { format } => format_detail(format),
            _ => None,
        };
        let detail =
            detail.map_or_else(|| error.masked_with("the value").to_string(), str::to_owned);
        return vec![FieldError { pointer, detail }];
    }
    names.iter().map(|name| of_member(name, detail)).collect()
}

/// What a member of one of the ledger's own formats has to look like: the commonest mistakes of a first request are here, and a
/// format's name alone helps nobody.
fn format_detail(format: &str) -> Option<&'static str> {
    match format {
        "amount" => Some(
            "an amount is a positive integer in minor units, as a string of at most 38 digits, such as \"2500\"",
        ),
        "amount_or_zero" => Some(
            "an amount is an integer in minor units, not negative, as a string of at most 38 digits, such as \"2500\"",
        ),
        "asset" => Some("an asset of this ledger, with its decimals, such as EUR/2"),
        "currency" => Some("the code of an asset of this ledger, such as EUR"),
        "subject" => Some("a subject is 1 to 128 visible ASCII characters"),
        _ => None,
    }
}

/// From one version to the next.
#[derive(Debug)]
struct Upcast {
    to: Version,
    set: Vec<(String, Expression)>,
    drop: Vec<String>,
}

/// Which elements of a list are one.
#[derive(Debug)]
struct Distinct {
    list: Vec<String>,
    by: Vec<String>,
    same: Vec<String>,
    dropped: String,
    code: String,
}

/// An event type.
#[derive(Debug)]
pub struct EventType {
    name: TypeName,
    summary: String,
    scope: Scope,
    current: Version,
    pub(super) passes_freeze: bool,
    versions: BTreeMap<Version, SchemaVersion>,
    upcasts: Vec<Upcast>,
    distinct: Vec<Distinct>,
    pub(super) effects: Effects,
}

impl EventType {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> &TypeName {
        &self.name
    }

    /// One line about it.
    #[must_use]
    pub fn summary(&self) -> &str {
        &self.summary
    }

    /// The scope that writing it takes.
    #[must_use]
    pub fn scope(&self) -> Scope {
        self.scope
    }

    /// The version that records have.
    #[must_use]
    pub fn current(&self) -> Version {
        self.current
    }

    /// All versions that are accepted, oldest first.
    pub fn versions(&self) -> impl Iterator<Item = &SchemaVersion> {
        self.versions.values()
    }

    /// One version.
    #[must_use]
    pub fn version(&self, version: Version) -> Option<&SchemaVersion> {
        self.versions.get(&version)
    }

    /// The JSON Schema of `data.input` in a record: the current version, and the counts of dropped elements.
    #[must_use]
    pub fn input_schema(&self) -> Value {
        let mut schema = self
            .version(self.current)
            .map_or(Value::Null, |current| current.schema.clone());
        if let Some(members) = schema.as_object_mut() {
            members.remove("$schema");
            members.remove("$id");
            if let Some(Value::Object(properties)) = members.get_mut("properties") {
                for one in &self.distinct {
                    let list = one.list.join(".");
                    properties.insert(
                        one.dropped.clone(),
                        serde_json::json!({
                            "type": "integer", "minimum": 1,
                            "description": format!("How many elements of {list} were dropped as duplicates."),
                        }),
                    );
                }
            }
        }
        schema
    }

    /// Data of an accepted version as data of the current one, which it satisfies.
    pub(super) fn upcast(
        &self,
        engine: &Engine,
        assets: &Assets,
        from: Version,
        data: &Value,
        subject: &Subject,
        writer: &Subject,
    ) -> Result<Value, Failure> {
        let mut data = data.clone();
        for step in self.upcasts.iter().filter(|step| step.to > from) {
            data = step.apply(engine, assets, data, subject, writer)?;
        }
        let holds = self
            .version(self.current)
            .is_some_and(|current| current.accepts(&data));
        if holds {
            Ok(data)
        } else {
            let (from, to) = (from, self.current);
            Err(Failure::new(format!(
                "the data of {from} did not become data of {to}"
            )))
        }
    }

    /// Whether [`Self::normalise`] has anything to look at.
    pub(super) fn normalises(&self, data: &Value) -> bool {
        self.distinct.iter().any(|one| one.finds(data))
    }

    /// Drops elements that are the same and counts them in the data. The error is the code and detail of a conflict.
    pub(super) fn normalise(&self, data: &mut Value) -> Result<(), (String, String)> {
        self.distinct.iter().try_for_each(|one| one.apply(data))
    }
}

impl Upcast {
    fn apply(
        &self,
        engine: &Engine,
        assets: &Assets,
        data: Value,
        subject: &Subject,
        writer: &Subject,
    ) -> Result<Value, Failure> {
        let resolve = |code: &str| assets.get(code).map(Asset::to_string);
        let variables = Variables::new(&data, subject.as_str(), writer.as_str());
        let context = engine.context(&variables);
        let mut made = Vec::with_capacity(self.set.len());
        for (name, expression) in &self.set {
            made.push((name.clone(), expression.json(&context, &resolve)?));
        }
        drop(context);
        drop(variables);
        let Value::Object(mut members) = data else {
            return Err(Failure::new("the data is no object"));
        };
        for name in &self.drop {
            members.remove(name);
        }
        members.extend(made);
        Ok(Value::Object(members))
    }
}

impl Distinct {
    fn finds(&self, data: &Value) -> bool {
        self.list
            .iter()
            .try_fold(data, |value, name| value.get(name))
            .is_some()
    }

    fn apply(&self, data: &mut Value) -> Result<(), (String, String)> {
        let found = self
            .list
            .iter()
            .try_fold(&mut *data, |value, name| value.get_mut(name));
        let Some(Value::Array(items)) = found else {
            return Ok(());
        };
        // A member that is absent differs from any that is there.
        fn picked<'a>(item: &'a Value, names: &[String]) -> Vec<Option<&'a Value>> {
            names.iter().map(|name| item.get(name)).collect()
        }
        let mut first = HashMap::with_capacity(items.len());
        let mut kept = Vec::with_capacity(items.len());
        for (index, item) in items.iter().enumerate() {
            match first.entry(picked(item, &self.by)) {
                Entry::Vacant(vacant) => {
                    vacant.insert((index, item));
                    kept.push(true);
                }
                Entry::Occupied(one)
                    if picked(one.get().1, &self.same) == picked(item, &self.same) =>
                {
                    kept.push(false);
                }
                Entry::Occupied(one) => {
                    let (by, same) = (self.by.join(" and "), self.same.join(" and "));
                    let list = self.list.join("/");
                    return Err((
                        self.code.clone(),
                        format!(
                            "/data/{list}/{} and /data/{list}/{index} are equal in {by} and differ in {same}",
                            one.get().0
                        ),
                    ));
                }
            }
        }
        let dropped = kept.iter().filter(|kept| !**kept).count();
        let mut kept = kept.into_iter();
        items.retain(|_| kept.next().unwrap_or(true));
        if dropped > 0
            && let Some(members) = data.as_object_mut()
        {
            members.insert(self.dropped.clone(), Value::from(dropped));
        }
        Ok(())
    }
}

/// The files of one type's folder.
#[derive(Debug, Default)]
pub(super) struct Folder {
    /// `type.toml`, parsed.
    pub(super) file: Option<TypeFile>,
    /// Its schemas: file name, version, text.
    pub(super) schemas: Vec<(String, Version, String)>,
    /// Its examples.
    pub(super) examples: Vec<(Version, Example)>,
}

/// Which file of a folder is wrong, and why.
pub(super) type Wrong = (String, Option<usize>, String);

fn in_type(reason: impl Into<String>) -> Wrong {
    ("type.toml".to_owned(), None, reason.into())
}

fn build_version(
    options: &jsonschema::ValidationOptions<'_>,
    name: &str,
    version: Version,
    text: String,
) -> Result<SchemaVersion, Wrong> {
    let schema: Value = serde_json::from_str(&text)
        .map_err(|error| (name.to_owned(), Some(error.line()), error.to_string()))?;
    let wrong = |reason: String| (name.to_owned(), None, reason);
    if schema.get("$schema").and_then(Value::as_str)
        != Some("https://json-schema.org/draft/2020-12/schema")
    {
        return Err(wrong("`$schema` is not JSON Schema 2020-12".to_owned()));
    }
    if schema.get("type") != Some(&Value::from("object")) {
        return Err(wrong("`type` is not \"object\"".to_owned()));
    }
    if schema.get("additionalProperties") != Some(&Value::Bool(false)) {
        return Err(wrong("`additionalProperties` is not false".to_owned()));
    }
    let validator = options
        .build(&schema)
        .map_err(|error| wrong(error.to_string()))?;
    Ok(SchemaVersion {
        version,
        text,
        schema,
        validator,
        examples: Vec::new(),
    })
}

impl EventType {
    /// Compiles the folder of a type.
    ///
    /// # Errors
    /// The file that is wrong, the line if known, and the reason.
    pub(super) fn build(
        name: TypeName,
        folder: Folder,
        engine: &Engine,
        options: &jsonschema::ValidationOptions<'_>,
    ) -> Result<Self, Wrong> {
        let file = folder
            .file
            .ok_or_else(|| in_type("the folder has no type.toml"))?;
        let mut versions = BTreeMap::new();
        for (path, version, text) in folder.schemas {
            versions.insert(version, build_version(options, &path, version, text)?);
        }
        for (version, example) in folder.examples {
            match versions.get_mut(&version) {
                Some(one) => one.examples.push(example),
                None => {
                    let reason = format!("the example {} is of no version", example.name);
                    return Err(in_type(reason));
                }
            }
        }
        let current = Version::parse(&file.current)
            .ok_or_else(|| in_type("`current` is no version such as \"1.0\""))?;
        let scope = Scope::parse(&file.scope)
            .filter(|scope| matches!(scope, Scope::Write | Scope::WriteAny | Scope::Admin))
            .ok_or_else(|| in_type("`scope` is no scope for writing"))?;
        if versions.keys().next_back() != Some(&current) {
            return Err(in_type("`current` is not the latest version of the folder"));
        }
        let upcasts = upcasts(engine, &versions, &file.upcast).map_err(in_type)?;
        let schema = versions
            .get(&current)
            .map_or(&Value::Null, |one| &one.schema);
        let distinct = file
            .distinct
            .iter()
            .map(|entry| distinct(entry, schema))
            .collect::<Result<_, _>>()
            .map_err(|reason| in_type(format!("[[distinct]]: {reason}")))?;
        let effects = Compiler { engine, schema }
            .effects(name.as_str(), &file.check, &file.moves, &file.unique)
            .map_err(in_type)?;
        Ok(EventType {
            name,
            summary: file.summary,
            scope,
            current,
            passes_freeze: file.passes_freeze,
            versions,
            upcasts,
            distinct,
            effects,
        })
    }
}

fn upcasts(
    engine: &Engine,
    versions: &BTreeMap<Version, SchemaVersion>,
    entries: &[UpcastEntry],
) -> Result<Vec<Upcast>, String> {
    let mut all: Vec<Upcast> = Vec::with_capacity(entries.len());
    for entry in entries {
        let wrong = |reason: String| format!("[[upcast]] to {}: {reason}", entry.to);
        let to = Version::parse(&entry.to)
            .filter(|to| versions.contains_key(to))
            .ok_or_else(|| wrong("there is no such version".to_owned()))?;
        let (_, before) = versions
            .range(..to)
            .next_back()
            .ok_or_else(|| wrong("there is no version before it".to_owned()))?;
        if all.last().is_some_and(|last| last.to >= to) {
            return Err(wrong(
                "upcasts are in ascending order, one for a version".to_owned(),
            ));
        }
        let compiler = Compiler {
            engine,
            schema: &before.schema,
        };
        let set = entry
            .set
            .iter()
            .map(|(name, text)| {
                let expression = compiler.plain(text).map_err(&wrong)?;
                Ok((name.clone(), expression))
            })
            .collect::<Result<_, String>>()?;
        all.push(Upcast {
            to,
            set,
            drop: entry.drop.clone(),
        });
    }
    Ok(all)
}

fn distinct(entry: &DistinctEntry, schema: &Value) -> Result<Distinct, String> {
    let list = data_path(&entry.list)?;
    if entry.by.is_empty() {
        return Err("`by` is empty".to_owned());
    }
    if !is_code(&entry.code) || !is_code(&entry.dropped) {
        return Err("`code` and `dropped` are of the form [a-z][a-z0-9_]*".to_owned());
    }
    let empty = Map::new();
    let properties = schema
        .get("properties")
        .and_then(Value::as_object)
        .unwrap_or(&empty);
    if properties.contains_key(&entry.dropped) {
        return Err(format!("clients may send {:?}", escaped(&entry.dropped)));
    }
    Ok(Distinct {
        list,
        by: entry.by.clone(),
        same: entry.same.clone(),
        dropped: entry.dropped.clone(),
        code: entry.code.clone(),
    })
}
