//! Topic patterns: which routing keys must have a queue.
//!
//! Pure; matches as the broker's topic exchange does.

/// Whether a routing key matches a topic pattern: words between dots, `*` stands for one word, `#` for any number of them.
#[must_use]
pub fn matches(pattern: &str, key: &str) -> bool {
    let pattern: Vec<&str> = pattern.split('.').collect();
    let key: Vec<&str> = key.split('.').collect();
    words_match(&pattern, &key)
}

/// Wildcards by table rather than by recursion: a pattern of many `#` must not take exponential time.
fn words_match(pattern: &[&str], key: &[&str]) -> bool {
    // reachable[i]: the pattern so far can end after the first i words of the key.
    let mut reachable = vec![false; key.len() + 1];
    if let Some(start) = reachable.first_mut() {
        *start = true;
    }
    for word in pattern {
        let mut next = vec![false; key.len() + 1];
        let mut any_before = false;
        for (at, cell) in next.iter_mut().enumerate() {
            let here = reachable.get(at).copied().unwrap_or(false);
            any_before |= here;
            let before = at > 0 && reachable.get(at - 1).copied().unwrap_or(false);
            *cell = match *word {
                "#" => any_before,
                "*" => before,
                literal => before && key.get(at - 1) == Some(&literal),
            };
        }
        reachable = next;
    }
    reachable.last().copied().unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn patterns_match_as_the_broker_does() {
        for (pattern, key, expected) in [
            ("#", "transfer", true),
            ("#", "a.b.c", true),
            ("transfer", "transfer", true),
            ("transfer", "transfers", false),
            ("*", "transfer", true),
            ("*", "a.b", false),
            ("a.#", "a", true),
            ("a.#", "a.b.c", true),
            ("a.*", "a", false),
            ("#.c", "a.b.c", true),
            ("a.#.c", "a.c", true),
            ("a.*.c", "a.b.c", true),
            ("a.*.c", "a.c", false),
            ("#.#.#.#.#.#.#.x", "a.a.a.a.a.a.a.a.a.a.a.a", false),
        ] {
            assert_eq!(matches(pattern, key), expected, "{pattern} {key}");
        }
    }
}
