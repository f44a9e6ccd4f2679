//! Load.
fn main(){}
