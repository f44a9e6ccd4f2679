//! Who sends a request and what the token allows, as plain data.
//!
//! Made by `auth` from a verified token; nothing here verifies anything.

use super::address::Subject;
use std::sync::Arc;

/// One right that a token can carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// `ledger:read`: one's own subject.
    Read,
    /// `ledger:write`: one's own subject.
    Write,
    /// `ledger:read:any`
    ReadAny,
    /// `ledger:write:any`
    WriteAny,
    /// `ledger:admin`
    Admin,
}

impl Scope {
    /// Every scope.
    pub const ALL: [Scope; 5] = [
        Scope::Read,
        Scope::Write,
        Scope::ReadAny,
        Scope::WriteAny,
        Scope::Admin,
    ];

    /// Its name in a token.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Scope::Read => "ledger:read",
            Scope::Write => "ledger:write",
            Scope::ReadAny => "ledger:read:any",
            Scope::WriteAny => "ledger:write:any",
            Scope::Admin => "ledger:admin",
        }
    }

    /// The scope of this name, if it is one of the ledger's.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|scope| scope.name() == name)
    }

    const fn bit(self) -> u8 {
        1 << (self as u8)
    }
}

/// A set of scopes. `:any` includes the scope for one's own subject.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scopes(u8);

impl Scopes {
    /// This set and one more.
    #[must_use]
    pub const fn with(self, scope: Scope) -> Self {
        Scopes(self.0 | scope.bit())
    }

    /// Whether the right is there.
    #[must_use]
    pub const fn has(self, scope: Scope) -> bool {
        let wanted = match scope {
            Scope::Read => Scope::Read.bit() | Scope::ReadAny.bit(),
            Scope::Write => Scope::Write.bit() | Scope::WriteAny.bit(),
            other => other.bit(),
        };
        self.0 & wanted != 0
    }
}

impl FromIterator<Scope> for Scopes {
    fn from_iter<I: IntoIterator<Item = Scope>>(scopes: I) -> Self {
        scopes.into_iter().fold(Scopes::default(), Scopes::with)
    }
}

/// Who sends a request: the verified claims that the ledger uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Principal {
    /// The token's `sub`, with the issuer's prefix if it has one.
    pub subject: Subject,
    /// The token's `iss`.
    pub issuer: Arc<str>,
    /// The token's `jti`.
    pub token_id: Arc<str>,
    /// The token's `iat`, seconds since 1970.
    pub issued_at: i64,
    /// The token's `exp`, seconds since 1970.
    pub expires_at: i64,
    /// What it may do.
    pub scopes: Scopes,
}
