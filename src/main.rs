//! Daybook.
fn main(){}
