//! The values that expressions handle beyond CEL's own: exact money, addresses and asset codes; and the functions that
//! make them.
//!
//! Pure. Money is 128 bits wide and never a float; an address never is a string, so it cannot be concatenated.

use crate::domain::{Address, Amount};
use cel::common::traits::{Adder, Comparer, Subtractor};
use cel::common::types::{CelBool, CelInt, CelList, CelMap, CelMapKey, CelNull, CelString};
use cel::common::types::{CelUInt, DYN_TYPE, Type};
use cel::common::value::{CowVal, StaticVal, Val};
use cel::{DeclarationError, Env, ExecutionError};
use serde_json::Value;
use std::any::Any;
use std::cmp::Ordering;

/// The name under which an overflow is reported, so that it is told apart from a mistake in the type.
pub(super) const OVERFLOW: &str = "amount_overflow";

/// An amount of money, maybe one that only the decision knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Money {
    /// Known now.
    Known(Amount),
    /// What the move of this name (or place) takes from one of its sources.
    Taken {
        /// The move's name, or its place from 0.
        of: String,
        /// The source's place from 0.
        source: usize,
    },
    /// A sum.
    Plus(Box<Money>, Box<Money>),
    /// A difference.
    Minus(Box<Money>, Box<Money>),
    /// A floored share in basis points.
    BasisPoints(Box<Money>, u32),
}

/// The address of an account.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place(pub(super) Address);

/// The code of an asset, to be looked up in the ledger's list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct AssetCode(pub(super) String);

static MONEY: Type = Type::new_unspecified_type("money");
static ADDRESS: Type = Type::new_unspecified_type("address");
static ASSET: Type = Type::new_unspecified_type("asset");

fn overflow() -> ExecutionError {
    ExecutionError::function_error(OVERFLOW, "an amount exceeds 38 digits")
}

impl Money {
    /// Reads money from a value: money itself, an amount's one spelling, or an integer.
    pub(super) fn of(value: &dyn Val) -> Result<Self, ExecutionError> {
        if let Some(money) = value.downcast_ref::<Money>() {
            return Ok(money.clone());
        }
        let amount = if let Some(text) = value.downcast_ref::<CelString>() {
            Amount::parse(text.inner())
        } else if let Some(int) = value.downcast_ref::<CelInt>() {
            Amount::new(i128::from(*int.inner()))
        } else if let Some(int) = value.downcast_ref::<CelUInt>() {
            Amount::new(i128::from(*int.inner()))
        } else {
            return Err(wrong_type(value, "money"));
        };
        amount
            .map(Money::Known)
            .map_err(|error| ExecutionError::function_error("money", error))
    }

    fn plus(self, other: Self) -> Result<Self, ExecutionError> {
        match (self, other) {
            (Money::Known(a), Money::Known(b)) => {
                a.plus(b).map(Money::Known).map_err(|_| overflow())
            }
            (a, b) => Ok(Money::Plus(Box::new(a), Box::new(b))),
        }
    }

    fn minus(self, other: Self) -> Result<Self, ExecutionError> {
        match (self, other) {
            (Money::Known(a), Money::Known(b)) => {
                a.minus(b).map(Money::Known).map_err(|_| overflow())
            }
            (a, b) => Ok(Money::Minus(Box::new(a), Box::new(b))),
        }
    }

    fn basis_points(self, points: u32) -> Result<Self, ExecutionError> {
        match self {
            Money::Known(amount) => amount
                .basis_points(points)
                .map(Money::Known)
                .map_err(|_| overflow()),
            other => Ok(Money::BasisPoints(Box::new(other), points)),
        }
    }
}

fn wrong_type(value: &dyn Val, want: &str) -> ExecutionError {
    ExecutionError::UnexpectedType {
        got: value.get_type().name().to_owned(),
        want: want.to_owned(),
    }
}

impl Val for Money {
    fn get_type(&self) -> &Type {
        &MONEY
    }
    fn cel_type() -> &'static Type {
        &MONEY
    }
    fn as_adder<'b, 'v>(&'b self) -> Option<&'b (dyn Adder + 'v)>
    where
        Self: 'v,
    {
        Some(self)
    }
    fn as_subtractor<'b, 'v>(&'b self) -> Option<&'b (dyn Subtractor + 'v)>
    where
        Self: 'v,
    {
        Some(self)
    }
    fn as_comparer(&self) -> Option<&dyn Comparer> {
        Some(self)
    }
    fn equals(&self, other: &dyn Val) -> bool {
        other.downcast_ref::<Money>() == Some(self)
    }
    fn clone_as_boxed<'v>(&self) -> Box<dyn Val + 'v> {
        Box::new(self.clone())
    }
    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }
}
impl StaticVal for Money {}

impl Adder for Money {
    fn add<'b, 'v>(&'b self, other: &(dyn Val + 'v)) -> Result<CowVal<'b, 'v>, ExecutionError>
    where
        Self: 'v,
    {
        Ok(CowVal::owned(self.clone().plus(Money::of(other)?)?))
    }
}

impl Subtractor for Money {
    fn sub<'b, 'v>(&'b self, other: &(dyn Val + 'v)) -> Result<CowVal<'b, 'v>, ExecutionError>
    where
        Self: 'v,
    {
        Ok(CowVal::owned(self.clone().minus(Money::of(other)?)?))
    }
}

impl Comparer for Money {
    fn compare(&self, other: &dyn Val) -> Result<Ordering, ExecutionError> {
        match (self, Money::of(other)?) {
            (Money::Known(a), Money::Known(b)) => Ok(a.cmp(&b)),
            _ => Err(ExecutionError::function_error(
                "compare",
                "an amount that only the decision knows",
            )),
        }
    }
}

macro_rules! opaque {
    ($type:ty, $cel:ident) => {
        impl Val for $type {
            fn get_type(&self) -> &Type {
                &$cel
            }
            fn cel_type() -> &'static Type {
                &$cel
            }
            fn equals(&self, other: &dyn Val) -> bool {
                other.downcast_ref::<$type>() == Some(self)
            }
            fn clone_as_boxed<'v>(&self) -> Box<dyn Val + 'v> {
                Box::new(self.clone())
            }
            fn as_any(&self) -> Option<&dyn Any> {
                Some(self)
            }
        }
        impl StaticVal for $type {}
    };
}
opaque!(Place, ADDRESS);
opaque!(AssetCode, ASSET);

/// What a function of the language gets and gives, as CEL wants it.
type Outcome<'b, 'v> = Result<CowVal<'b, 'v>, ExecutionError>;

fn text<'a>(value: &'a CowVal<'_, '_>) -> Result<&'a str, ExecutionError> {
    match value.downcast_ref::<CelString>() {
        Some(text) => Ok(text.inner()),
        None => Err(wrong_type(value.as_ref(), "string")),
    }
}

fn argument<'a, 'b, 'v>(
    args: &'a [CowVal<'b, 'v>],
    index: usize,
) -> Result<&'a CowVal<'b, 'v>, ExecutionError> {
    args.get(index)
        .ok_or_else(ExecutionError::missing_argument_or_target)
}

fn place<'b, 'v>(segments: &[&str]) -> Outcome<'b, 'v> {
    match Address::from_segments(segments.iter().copied()) {
        Some(address) => Ok(CowVal::owned(Place(address))),
        None => Err(ExecutionError::function_error(
            "address",
            "a segment is empty or the address is too long",
        )),
    }
}

fn user<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    let (owner, name) = (argument(&args, 0)?, argument(&args, 1)?);
    place(&["users", text(owner)?, text(name)?])
}

fn platform<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    place(&["platform", text(argument(&args, 0)?)?])
}

fn world<'b, 'v>(_: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    place(&["world"])
}

fn address<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    let segments: Result<Vec<&str>, ExecutionError> = args.iter().map(text).collect();
    place(&segments?)
}

fn asset<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    let code = text(argument(&args, 0)?)?.to_owned();
    Ok(CowVal::owned(AssetCode(code)))
}

fn money<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    Ok(CowVal::owned(Money::of(argument(&args, 0)?.as_ref())?))
}

fn bps<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    let points = argument(&args, 1)?;
    let points = points
        .downcast_ref::<CelInt>()
        .and_then(|points| u32::try_from(*points.inner()).ok())
        .ok_or_else(|| ExecutionError::function_error("bps", "not a number of basis points"))?;
    let whole = Money::of(argument(&args, 0)?.as_ref())?;
    Ok(CowVal::owned(whole.basis_points(points)?))
}

fn sum<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    let list = argument(&args, 0)?;
    let mut items = list
        .as_iterable()
        .ok_or_else(|| wrong_type(list.as_ref(), "list"))?
        .iter();
    let mut total = Money::Known(Amount::ZERO);
    while let Some(item) = items.next() {
        total = total.plus(Money::of(item)?)?;
    }
    Ok(CowVal::owned(total))
}

fn taken<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Outcome<'b, 'v> {
    let (of, source) = (argument(&args, 0)?, argument(&args, 1)?);
    let of = match of.downcast_ref::<CelInt>() {
        Some(place) => place.inner().to_string(),
        None => text(of)?.to_owned(),
    };
    let source = source
        .downcast_ref::<CelInt>()
        .and_then(|source| usize::try_from(*source.inner()).ok())
        .ok_or_else(|| ExecutionError::function_error("taken", "not the place of a source"))?;
    Ok(CowVal::owned(Money::Taken { of, source }))
}

/// Most segments that `address(...)` takes.
pub(super) const SEGMENTS_MAX: usize = 8;

/// CEL's own environment without optional values, and the functions of the ledger.
pub(super) fn environment() -> Result<Env, DeclarationError> {
    let mut env = Env::stdlib().with_optional_support(false);
    let any = |count: usize| (0..count).map(|_| DYN_TYPE).collect::<Vec<_>>();
    env.add_overload("user", "user", any(2), user)?;
    env.add_overload("platform", "platform", any(1), platform)?;
    env.add_overload("world", "world", any(0), world)?;
    for count in 1..=SEGMENTS_MAX {
        env.add_overload("address", &format!("address_{count}"), any(count), address)?;
    }
    env.add_overload("asset", "asset", any(1), asset)?;
    env.add_overload("money", "money", any(1), money)?;
    env.add_overload("bps", "bps", any(2), bps)?;
    env.add_overload("sum", "sum", any(1), sum)?;
    env.add_overload("taken", "taken", any(2), taken)?;
    Ok(env)
}

/// A JSON value as CEL sees it; texts are borrowed.
pub(super) fn bind<'v>(value: &'v Value) -> Box<dyn Val + 'v> {
    match value {
        Value::Null => Box::new(CelNull),
        Value::Bool(flag) => Box::new(CelBool::from(*flag)),
        Value::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(int), _) => Box::new(CelInt::from(int)),
            (None, Some(int)) => Box::new(CelUInt::from(int)),
            // Floats are refused when a request is read; a float that came another way is no number here.
            (None, None) => Box::new(CelNull),
        },
        Value::String(text) => Box::new(CelString::from(text.as_str())),
        Value::Array(items) => Box::new(CelList::from(
            items.iter().map(bind).collect::<Vec<Box<dyn Val + 'v>>>(),
        )),
        Value::Object(members) => Box::new(CelMap::from(
            members
                .iter()
                .map(|(name, member)| {
                    let key = CelMapKey::String(CelString::from(name.as_str()));
                    (key, bind(member))
                })
                .collect::<std::collections::HashMap<_, _>>(),
        )),
    }
}

/// A CEL value as JSON; None for what JSON cannot say. Asset codes are resolved by `asset`.
pub(super) fn unbind(value: &dyn Val, asset: &dyn Fn(&str) -> Option<String>) -> Option<Value> {
    if let Some(text) = value.downcast_ref::<CelString>() {
        return Some(Value::from(text.inner()));
    }
    if let Some(code) = value.downcast_ref::<AssetCode>() {
        return asset(&code.0).map(Value::from);
    }
    if let Some(Money::Known(amount)) = value.downcast_ref::<Money>() {
        return Some(Value::from(amount.to_string()));
    }
    if let Some(int) = value.downcast_ref::<CelInt>() {
        return Some(Value::from(*int.inner()));
    }
    if let Some(int) = value.downcast_ref::<CelUInt>() {
        return Some(Value::from(*int.inner()));
    }
    if let Some(flag) = value.downcast_ref::<CelBool>() {
        return Some(Value::from(*flag.inner()));
    }
    if value.downcast_ref::<CelNull>().is_some() {
        return Some(Value::Null);
    }
    if let Some(list) = value.downcast_ref::<CelList>() {
        let items: Option<Vec<Value>> = list
            .inner()
            .iter()
            .map(|item| unbind(item.as_ref(), asset))
            .collect();
        return items.map(Value::from);
    }
    let map = value.downcast_ref::<CelMap>()?;
    let members: Option<serde_json::Map<String, Value>> = map
        .inner()
        .iter()
        .map(|(key, member)| match key {
            CelMapKey::String(name) => {
                Some((name.inner().to_owned(), unbind(member.as_ref(), asset)?))
            }
            _ => None,
        })
        .collect();
    members.map(Value::from)
}
