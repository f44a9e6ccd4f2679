//! All SQL of the service. Nothing here decides anything.

pub mod reads;
