//! Daybook.
fn main() {}
