//! Expressions of a type: compiled and checked once, evaluated for every event.
//!
//! CEL has no type checker and no step limit, so nothing is compiled here whose names are not in a closed list, that
//! nests comprehensions, that concatenates addresses, or that reads what the schema does not promise.

use super::values::{AssetCode, Money, OVERFLOW, Place, SEGMENTS_MAX, bind, environment};
use crate::domain::Address;
use cel::common::ast::{CallExpr, Expr, LiteralValue, operators};
use cel::common::types::{CelBool, CelInt, CelString};
use cel::common::value::{CowVal, Val};
use cel::context::VariableResolver;
use cel::{Context, Env, ExecutionError, Program};
use serde_json::Value;
use std::sync::Arc;

/// Longest expression, in bytes.
pub(super) const LENGTH_MAX: usize = 1_024;

/// Deepest expression tree.
const DEPTH_MAX: usize = 40;

/// What an expression's value is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// A bool: `when` and `that`.
    Truth,
    /// An amount of a move, which may depend on the moves before it.
    Amount,
    /// An account.
    Account,
    /// Anything else: an asset, a key, a share, a member.
    Any,
}

/// What an expression may name, and what its data promises.
#[derive(Clone, Copy, Debug)]
pub(super) struct Surroundings<'a> {
    /// The JSON Schema that the data satisfies.
    pub(super) schema: &'a Value,
    /// The list whose elements `item` is; None when there is no `item`.
    pub(super) each: Option<&'a [String]>,
    /// Names and numbers of sources of the moves before this one.
    pub(super) moves: &'a [(Option<String>, usize)],
    /// Expressions that must hold for this one to be evaluated.
    pub(super) guards: &'a [&'a Expression],
}

/// A compiled, checked expression.
#[derive(Debug)]
pub(super) struct Expression {
    program: Program,
}

/// Compiles and evaluates: the environment is built once and shared.
#[derive(Clone)]
pub(super) struct Engine {
    env: Arc<Env>,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Engine")
    }
}

/// Why an expression failed on a valid event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Failure {
    /// `type_error`, or `amount_overflow` when an amount exceeds 38 digits.
    pub(super) code: &'static str,
    /// What happened.
    pub(super) detail: String,
}

impl Failure {
    /// A mistake in the type.
    pub(super) fn new(detail: impl Into<String>) -> Self {
        Failure {
            code: "type_error",
            detail: detail.into(),
        }
    }
}

impl From<ExecutionError> for Failure {
    fn from(error: ExecutionError) -> Self {
        match error {
            ExecutionError::FunctionError { function, message } if function == OVERFLOW => {
                Failure {
                    code: OVERFLOW,
                    detail: message,
                }
            }
            other => {
                let mut detail = other.to_string();
                detail.truncate(detail.floor_char_boundary(200));
                Failure::new(detail)
            }
        }
    }
}

/// The variables of one event. `item` is added where a target is made for each element of a list.
#[derive(Debug)]
pub(super) struct Variables<'a> {
    data: Box<dyn Val + 'a>,
    subject: &'a str,
    writer: &'a str,
}

impl<'a> Variables<'a> {
    /// Binds the data of one event.
    pub(super) fn new(data: &'a Value, subject: &'a str, writer: &'a str) -> Self {
        Variables {
            data: bind(data),
            subject,
            writer,
        }
    }
}

impl VariableResolver for Variables<'_> {
    fn resolve<'b>(&'b self, variable: &str) -> Option<CowVal<'b, 'b>> {
        match variable {
            "data" => Some(CowVal::Borrowed(self.data.as_ref())),
            "subject" => Some(CowVal::owned(CelString::from(self.subject))),
            "writer" => Some(CowVal::owned(CelString::from(self.writer))),
            _ => None,
        }
    }
}

impl Engine {
    /// Builds the environment.
    ///
    /// # Errors
    /// The text of a clash of declarations, which would be a mistake in this program.
    pub(super) fn new() -> Result<Self, String> {
        let env = environment().map_err(|error| error.to_string())?;
        Ok(Engine { env: Arc::new(env) })
    }

    /// Compiles an expression and checks it.
    ///
    /// # Errors
    /// What is wrong with it, in one line.
    pub(super) fn compile(
        &self,
        text: &str,
        purpose: Purpose,
        around: Surroundings<'_>,
    ) -> Result<Expression, String> {
        let named = |reason: String| format!("{text:?}: {reason}");
        if text.len() > LENGTH_MAX {
            return Err(format!("an expression is longer than {LENGTH_MAX} bytes"));
        }
        let program = self
            .env
            .compile(text)
            .map_err(|error| named(error.to_string().replace('\n', " ")))?;
        let tree = &program.expression().expr;
        let mut checker = Checker {
            around,
            purpose,
            bound: Vec::new(),
            reads: Vec::new(),
            tests: Vec::new(),
        };
        checker.check(tree, 0).map_err(named)?;
        match purpose {
            Purpose::Amount if !is_amount(tree) => {
                return Err(named(
                    "an amount is a member, or made by money(), bps(), sum() or taken()".to_owned(),
                ));
            }
            Purpose::Account if !is_account(tree) => {
                return Err(named(
                    "an account is made by user(), platform(), world() or address()".to_owned(),
                ));
            }
            _ => {}
        }
        let (reads, mut tests) = (checker.reads, checker.tests);
        for guard in around.guards {
            tests.extend(guard.tests(around));
        }
        for path in &reads {
            promised(around.schema, path, &tests).map_err(named)?;
        }
        Ok(Expression { program })
    }

    /// A context for the expressions of one event.
    pub(super) fn context<'v>(&self, variables: &'v Variables<'v>) -> Context<'v, 'v> {
        let mut context = Context::with_env(Arc::clone(&self.env));
        context.set_variable_resolver(variables);
        context
    }
}

impl Expression {
    fn tests(&self, around: Surroundings<'_>) -> Vec<Vec<String>> {
        let mut checker = Checker {
            around,
            purpose: Purpose::Truth,
            bound: Vec::new(),
            reads: Vec::new(),
            tests: Vec::new(),
        };
        // It was checked when it was compiled; only the tests are of interest here.
        let _ = checker.check(&self.program.expression().expr, 0);
        checker.tests
    }

    fn evaluate<'e, 'v>(&'e self, context: &'e Context<'_, 'v>) -> Result<CowVal<'e, 'v>, Failure> {
        cel::Value::resolve_val(self.program.expression(), context).map_err(Failure::from)
    }

    /// Its value as a bool.
    pub(super) fn truth(&self, context: &Context<'_, '_>) -> Result<bool, Failure> {
        let value = self.evaluate(context)?;
        match value.downcast_ref::<CelBool>() {
            Some(flag) => Ok(*flag.inner()),
            None => Err(mismatch(value.as_ref(), "a bool")),
        }
    }

    /// Its value as an amount; a text is read as one.
    pub(super) fn amount(&self, context: &Context<'_, '_>) -> Result<Money, Failure> {
        let value = self.evaluate(context)?;
        Ok(Money::of(value.as_ref())?)
    }

    /// Its value as an account's address.
    pub(super) fn account(&self, context: &Context<'_, '_>) -> Result<Address, Failure> {
        let value = self.evaluate(context)?;
        match value.downcast_ref::<Place>() {
            Some(place) => Ok(place.0.clone()),
            None => Err(mismatch(value.as_ref(), "an address")),
        }
    }

    /// Its value as an asset: the spelling, or the code of `asset(...)`.
    pub(super) fn asset(&self, context: &Context<'_, '_>) -> Result<AssetName, Failure> {
        let value = self.evaluate(context)?;
        if let Some(code) = value.downcast_ref::<AssetCode>() {
            return Ok(AssetName::Code(code.0.clone()));
        }
        match value.downcast_ref::<CelString>() {
            Some(text) => Ok(AssetName::Spelling(text.inner().to_owned())),
            None => Err(mismatch(value.as_ref(), "an asset")),
        }
    }

    /// Its value as a text; an integer is written in decimal.
    pub(super) fn text(&self, context: &Context<'_, '_>) -> Result<String, Failure> {
        let value = self.evaluate(context)?;
        if let Some(int) = value.downcast_ref::<CelInt>() {
            return Ok(int.inner().to_string());
        }
        match value.downcast_ref::<CelString>() {
            Some(text) => Ok(text.inner().to_owned()),
            None => Err(mismatch(value.as_ref(), "a string")),
        }
    }

    /// Its value as a number of basis points.
    pub(super) fn share(&self, context: &Context<'_, '_>) -> Result<u32, Failure> {
        let value = self.evaluate(context)?;
        value
            .downcast_ref::<CelInt>()
            .and_then(|int| u32::try_from(*int.inner()).ok())
            .filter(|points| *points <= 10_000)
            .ok_or_else(|| mismatch(value.as_ref(), "a share of 0 to 10000 basis points"))
    }

    /// Its value as JSON.
    pub(super) fn json(
        &self,
        context: &Context<'_, '_>,
        asset: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Value, Failure> {
        let value = self.evaluate(context)?;
        super::values::unbind(value.as_ref(), asset)
            .ok_or_else(|| mismatch(value.as_ref(), "JSON, or a known asset"))
    }
}

/// An asset as an expression names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum AssetName {
    /// `EUR/2`.
    Spelling(String),
    /// `EUR`, to be looked up.
    Code(String),
}

fn mismatch(value: &dyn Val, want: &str) -> Failure {
    Failure::new(format!("got {}, want {want}", value.get_type().name()))
}

fn is_path(tree: &Expr) -> bool {
    match tree {
        Expr::Ident(_) => true,
        Expr::Select(select) => !select.test && is_path(&select.operand.expr),
        _ => false,
    }
}

fn is_money(tree: &Expr) -> bool {
    let Expr::Call(call) = tree else { return false };
    match (call.func_name.as_str(), call.args.as_slice()) {
        ("money" | "bps" | "sum" | "taken", _) => true,
        (operators::ADD | operators::SUBSTRACT, [left, _]) => is_money(&left.expr),
        (operators::CONDITIONAL, [_, yes, no]) => is_money(&yes.expr) && is_money(&no.expr),
        _ => false,
    }
}

fn is_amount(tree: &Expr) -> bool {
    match tree {
        Expr::Call(call) if call.func_name == operators::CONDITIONAL => {
            call.args.iter().skip(1).all(|arm| is_amount(&arm.expr))
        }
        _ => is_path(tree) || is_money(tree),
    }
}

fn is_account(tree: &Expr) -> bool {
    let Expr::Call(call) = tree else { return false };
    match call.func_name.as_str() {
        "user" | "platform" | "world" | "address" => true,
        operators::CONDITIONAL => call.args.iter().skip(1).all(|arm| is_account(&arm.expr)),
        _ => false,
    }
}

/// Whether the left side of `+` or `-` says what is added: two members would be two texts, and concatenated.
fn is_addable(tree: &Expr) -> bool {
    match tree {
        Expr::Literal(_) | Expr::List(_) => true,
        Expr::Ident(name) => name.starts_with('@'),
        Expr::Call(call) => match call.func_name.as_str() {
            operators::ADD | operators::SUBSTRACT => true,
            name => is_money(tree) || matches!(name, "string" | "size"),
        },
        _ => false,
    }
}

/// Function names, whether called on a value, and how many arguments they take besides it.
const FUNCTIONS: [(&str, bool, std::ops::RangeInclusive<usize>); 15] = [
    ("user", false, 2..=2),
    ("platform", false, 1..=1),
    ("world", false, 0..=0),
    ("address", false, 1..=SEGMENTS_MAX),
    ("asset", false, 1..=1),
    ("money", false, 1..=1),
    ("bps", false, 2..=2),
    ("sum", false, 1..=1),
    ("taken", false, 2..=2),
    ("size", false, 1..=1),
    ("string", false, 1..=1),
    ("size", true, 0..=0),
    ("startsWith", true, 1..=1),
    ("endsWith", true, 1..=1),
    ("contains", true, 1..=1),
];

const COMPARISONS: [&str; 7] = [
    operators::EQUALS,
    operators::NOT_EQUALS,
    operators::LESS,
    operators::LESS_EQUALS,
    operators::GREATER,
    operators::GREATER_EQUALS,
    operators::IN,
];

const OTHER_OPERATORS: [&str; 11] = [
    operators::CONDITIONAL,
    operators::LOGICAL_AND,
    operators::LOGICAL_OR,
    operators::LOGICAL_NOT,
    operators::ADD,
    operators::SUBSTRACT,
    operators::MULTIPLY,
    operators::DIVIDE,
    operators::MODULO,
    operators::NEGATE,
    operators::NOT_STRICTLY_FALSE,
];

/// Walks a tree once: names, nesting, and which members it reads and tests.
struct Checker<'a> {
    around: Surroundings<'a>,
    purpose: Purpose,
    /// Variables of comprehensions, with the path of what they stand for.
    bound: Vec<(String, Option<Vec<String>>)>,
    reads: Vec<Vec<String>>,
    tests: Vec<Vec<String>>,
}

impl Checker<'_> {
    fn check(&mut self, tree: &Expr, depth: usize) -> Result<(), String> {
        if depth > DEPTH_MAX {
            return Err("is nested too deep".to_owned());
        }
        match tree {
            Expr::Literal(LiteralValue::Double(_) | LiteralValue::Bytes(_)) => {
                Err("there are neither fractions nor bytes".to_owned())
            }
            Expr::Literal(_) => Ok(()),
            Expr::Ident(name) => self.variable(name),
            Expr::Select(select) => {
                self.check_operand(&select.operand.expr, depth)?;
                if let Some(mut path) = self.path(&select.operand.expr) {
                    path.push(select.field.clone());
                    if select.test {
                        self.reads.push(path[..path.len() - 1].to_vec());
                        self.tests.push(path);
                    } else {
                        self.reads.push(path);
                    }
                }
                Ok(())
            }
            Expr::List(list) if list.optional_indices.is_empty() => list
                .elements
                .iter()
                .try_for_each(|element| self.check(&element.expr, depth + 1)),
            Expr::Call(call) => self.call(call, depth),
            Expr::Comprehension(one) => {
                if self.around.each.is_some() {
                    return Err("has a comprehension beneath `each`".to_owned());
                }
                if self.bound.iter().any(|(name, _)| *name == one.iter_var)
                    || !self.bound.is_empty()
                {
                    return Err("nests one comprehension in another".to_owned());
                }
                if one.iter_var2.is_some() || self.variable(&one.iter_var).is_ok() {
                    return Err(format!("binds {:?} anew", one.iter_var));
                }
                self.check(&one.iter_range.expr, depth + 1)?;
                let items = self.path(&one.iter_range.expr).map(|mut path| {
                    path.push("[]".to_owned());
                    path
                });
                self.bound.push((one.iter_var.clone(), items));
                self.bound.push((one.accu_var.clone(), None));
                for part in [&one.accu_init, &one.loop_cond, &one.loop_step, &one.result] {
                    self.check(&part.expr, depth + 1)?;
                }
                self.bound.clear();
                Ok(())
            }
            _ => Err("there are neither maps, structs nor optional values".to_owned()),
        }
    }

    /// The operand of a selection: its own reads are covered by the longer path.
    fn check_operand(&mut self, tree: &Expr, depth: usize) -> Result<(), String> {
        match tree {
            Expr::Ident(name) => self.variable(name),
            Expr::Select(select) if !select.test => {
                self.check_operand(&select.operand.expr, depth + 1)
            }
            other => self.check(other, depth + 1),
        }
    }

    fn variable(&self, name: &str) -> Result<(), String> {
        let known = matches!(name, "data" | "subject" | "writer")
            || (name == "item" && self.around.each.is_some())
            || self.bound.iter().any(|(bound, _)| bound == name);
        if known {
            Ok(())
        } else {
            Err(format!("there is no variable {name:?}"))
        }
    }

    fn call(&mut self, call: &CallExpr, depth: usize) -> Result<(), String> {
        let name = call.func_name.as_str();
        let known = COMPARISONS.contains(&name)
            || OTHER_OPERATORS.contains(&name)
            || FUNCTIONS.iter().any(|(function, on_value, count)| {
                *function == name
                    && *on_value == call.target.is_some()
                    && count.contains(&call.args.len())
            });
        if !known {
            let count = call.args.len();
            return Err(format!(
                "there is no function {name:?} of {count} arguments"
            ));
        }
        if matches!(name, operators::ADD | operators::SUBSTRACT) {
            let addable = call.args.first().is_none_or(|left| is_addable(&left.expr));
            if !addable {
                return Err(
                    "what is added to must be money(...), string(...) or a literal".to_owned(),
                );
            }
        }
        if name == "taken" {
            self.taken(call)?;
        }
        if COMPARISONS.contains(&name) && call.args.iter().any(|arg| has_taken(&arg.expr)) {
            return Err("compares what only the decision knows".to_owned());
        }
        call.target
            .iter()
            .map(|target| &target.expr)
            .chain(call.args.iter().map(|arg| &arg.expr))
            .try_for_each(|part| self.check(part, depth + 1))
    }

    fn taken(&self, call: &CallExpr) -> Result<(), String> {
        if self.purpose != Purpose::Amount {
            return Err("taken() is for amounts of moves".to_owned());
        }
        let of = match call.args.first().map(|of| &of.expr) {
            Some(Expr::Literal(LiteralValue::String(name))) => self
                .around
                .moves
                .iter()
                .find(|(known, _)| known.as_deref() == Some(name.inner())),
            Some(Expr::Literal(LiteralValue::Int(place))) => usize::try_from(*place.inner())
                .ok()
                .and_then(|place| self.around.moves.get(place)),
            _ => None,
        };
        let source = match call.args.get(1).map(|source| &source.expr) {
            Some(Expr::Literal(LiteralValue::Int(place))) => usize::try_from(*place.inner()).ok(),
            _ => None,
        };
        match (of, source) {
            (Some((_, sources)), Some(source)) if source < *sources => Ok(()),
            _ => Err("taken() names no source of an earlier move".to_owned()),
        }
    }

    /// The path in the data of a chain of members.
    fn path(&self, tree: &Expr) -> Option<Vec<String>> {
        match tree {
            Expr::Ident(name) if name == "data" => Some(Vec::new()),
            Expr::Ident(name) if name == "item" => self.around.each.map(|list| {
                let mut path = list.to_vec();
                path.push("[]".to_owned());
                path
            }),
            Expr::Ident(name) => self
                .bound
                .iter()
                .find(|(bound, _)| bound == name)
                .and_then(|(_, path)| path.clone()),
            Expr::Select(select) if !select.test => {
                let mut path = self.path(&select.operand.expr)?;
                path.push(select.field.clone());
                Some(path)
            }
            _ => None,
        }
    }
}

fn has_taken(tree: &Expr) -> bool {
    match tree {
        Expr::Call(call) => {
            call.func_name == "taken" || call.args.iter().any(|arg| has_taken(&arg.expr))
        }
        _ => false,
    }
}

/// Whether the schema requires every member on the path, or an expression tests for it.
fn promised(schema: &Value, path: &[String], tests: &[Vec<String>]) -> Result<(), String> {
    let mut node = Some(schema);
    for (index, name) in path.iter().enumerate() {
        let here = node.map(|node| resolved(schema, node));
        if name == "[]" {
            node = here.and_then(|here| here.get("items"));
            continue;
        }
        let required = here
            .and_then(|here| here.get("required"))
            .and_then(Value::as_array)
            .is_some_and(|members| members.iter().any(|member| member == name));
        if !required && !tests.iter().any(|test| test[..] == path[..=index]) {
            let full = path[..=index].join(".");
            return Err(format!(
                "reads {full:?}, which the schema does not require: test it with has()"
            ));
        }
        node = here
            .and_then(|here| here.get("properties"))
            .and_then(|members| members.get(name));
        let closed =
            here.is_some_and(|here| here.get("additionalProperties") == Some(&Value::Bool(false)));
        if node.is_none() && closed {
            return Err(format!("reads {name:?}, which the schema does not have"));
        }
    }
    Ok(())
}

fn resolved<'a>(schema: &'a Value, node: &'a Value) -> &'a Value {
    node.get("$ref")
        .and_then(Value::as_str)
        .and_then(|target| target.strip_prefix('#'))
        .and_then(|pointer| schema.pointer(pointer))
        .unwrap_or(node)
}

/// The context for one element of a list.
pub(super) fn with_item<'b, 'v>(context: &'b Context<'b, 'v>, item: &'v Value) -> Context<'b, 'v> {
    let mut inner = context.new_inner_scope();
    inner.add_variable_as_val("item", bind(item));
    inner
}
