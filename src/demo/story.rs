//! A grammar of little stories.
//!
//! A story has a hero with a trait, a place, a wish or a mishap, a helper, an attempt that fails, one that works, and an end that
//! refers back to all of them: names, pronouns, objects and places agree throughout. That is what a small model can visibly
//! learn. The lists are short on purpose: a few hundred small steps must be enough to write stories like these.

use crate::data::mix;

/// An endless sequence of stories, the same for the same seed.
#[derive(Debug, Clone)]
pub struct Stories {
    seed: u64,
    next: u64,
}

impl Stories {
    /// The stories of a seed.
    pub fn new(seed: u64) -> Self {
        Self { seed, next: 0 }
    }
}

impl Iterator for Stories {
    type Item = String;

    fn next(&mut self) -> Option<String> {
        self.next += 1;
        Some(story(self.seed, self.next - 1))
    }
}

/// Story `number` of a seed.
pub fn story(seed: u64, number: u64) -> String {
    let mut dice = Dice { state: mix(mix(seed, 0x5707), number) };
    let cast = Cast::new(&mut dice);
    let mut text = String::new();
    for part in [OPENINGS, WISHES, FAILURES, HELPS, SOLUTIONS, ENDINGS] {
        // Two stories in five skip the failed attempt.
        if std::ptr::eq(part, FAILURES) && dice.roll(5) < 2 {
            continue;
        }
        if !text.is_empty() {
            text.push(if dice.roll(4) == 0 { '\n' } else { ' ' });
        }
        text.push_str(&cast.fill(dice.pick(part)));
    }
    text
}

struct Dice {
    state: u64,
}

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.state = self.state.wrapping_add(1);
        (mix(self.state, 0xD1CE) % sides as u64) as usize
    }

    fn pick<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.roll(items.len())]
    }
}

/// The words that stand for the slots of one story.
struct Cast {
    words: Vec<(&'static str, String)>,
}

impl Cast {
    fn new(dice: &mut Dice) -> Self {
        let (name, female) = dice.pick(NAMES);
        let kind = match dice.pick(KINDS) {
            "girl" | "boy" => {
                if female {
                    "girl"
                } else {
                    "boy"
                }
            }
            animal => animal,
        };
        let helper = loop {
            let helper = dice.pick(KINDS);
            if helper != kind && !["girl", "boy"].contains(&helper) {
                break helper;
            }
        };
        let friend = loop {
            let (friend, _) = dice.pick(NAMES);
            if friend != name {
                break friend;
            }
        };
        let (thing, loss) = dice.pick(THINGS);
        let (place, spot) = dice.pick(PLACES);
        let (she, her, hers) = if female { ("she", "her", "her") } else { ("he", "him", "his") };
        let mut words: Vec<(&'static str, String)> = [
            ("name", name),
            ("kind", kind),
            ("helper", helper),
            ("friend", friend),
            ("thing", thing),
            ("loss", loss),
            ("place", place),
            ("spot", spot),
            ("she", she),
            ("her", her),
            ("hers", hers),
            ("trait", dice.pick(TRAITS)),
            ("color", dice.pick(COLORS)),
            ("feeling", dice.pick(FEELINGS)),
            ("time", dice.pick(TIMES)),
            ("weather", dice.pick(WEATHERS)),
            ("food", dice.pick(FOODS)),
            ("tool", dice.pick(TOOLS)),
            ("lesson", dice.pick(LESSONS)),
            ("quality", dice.pick(QUALITIES)),
        ]
        .into_iter()
        .map(|(slot, word)| (slot, word.to_owned()))
        .collect();
        words.push(("number", dice.pick(&["two", "three", "four", "five"]).to_owned()));
        Self { words }
    }

    /// Replaces `{slot}`; `{Slot}` begins with a capital, `{a slot}` takes the article that the word needs.
    fn fill(&self, pattern: &str) -> String {
        let mut text = String::new();
        let mut rest = pattern;
        while let Some(open) = rest.find('{') {
            let close = open + rest[open..].find('}').expect("every slot of the grammar is closed");
            text.push_str(&rest[..open]);
            let slot = &rest[open + 1..close];
            let (article, slot) = slot.strip_prefix("a ").map_or((false, slot), |slot| (true, slot));
            let word = self.word(&slot.to_ascii_lowercase());
            if article {
                let vowel = word.starts_with(['a', 'e', 'i', 'o', 'u']) || word == "honest";
                text.push_str(if vowel { "an " } else { "a " });
            }
            if slot.starts_with(|c: char| c.is_ascii_uppercase()) {
                text.extend(word.chars().next().map(|c| c.to_ascii_uppercase()));
                text.push_str(&word[1..]);
            } else {
                text.push_str(word);
            }
            rest = &rest[close + 1..];
        }
        text.push_str(rest);
        text
    }

    fn word(&self, slot: &str) -> &str {
        let found = self.words.iter().find(|(name, _)| *name == slot);
        &found.expect("every slot of the grammar has a word").1
    }
}

/// A name, and whether its bearer is "she".
const NAMES: &[(&str, bool)] = &[
    ("Mila", true),
    ("Ben", false),
    ("Ada", true),
    ("Tom", false),
    ("Nora", true),
    ("Finn", false),
    ("Lucy", true),
    ("Sam", false),
    ("Ivy", true),
    ("Max", false),
];
const KINDS: &[&str] = &["girl", "boy", "fox", "bear", "rabbit", "mouse", "owl", "frog", "duck"];
const TRAITS: &[&str] = &["little", "brave", "shy", "curious", "clever", "kind"];
const COLORS: &[&str] = &["red", "blue", "green", "yellow", "orange"];
/// A treasure, and what happens to it.
const THINGS: &[(&str, &str)] = &[
    ("kite", "flew away over the trees"),
    ("boat", "drifted down the river"),
    ("lantern", "went out"),
    ("ball", "rolled down the hill"),
    ("bell", "lost its sound"),
    ("drum", "broke"),
    ("hat", "was blown into a tree"),
];
/// A place, and a spot in it.
const PLACES: &[(&str, &str)] = &[
    ("forest", "under the tall oak"),
    ("village", "by the old bridge"),
    ("valley", "near the waterfall"),
    ("garden", "behind the rose bush"),
    ("meadow", "beside the quiet pond"),
    ("town", "next to the bakery"),
];
const FEELINGS: &[&str] = &["sad", "worried", "upset", "lonely", "angry"];
const TIMES: &[&str] = &["One morning", "One day", "One evening", "On a Sunday", "Early one day"];
const WEATHERS: &[&str] =
    &["the sun was shining", "it was raining", "the wind was strong", "snow was falling"];
const FOODS: &[&str] = &["warm bread", "apple pie", "honey cakes", "berry soup", "cheese"];
const TOOLS: &[&str] =
    &["a long rope", "a wooden ladder", "a strong net", "a ball of string", "an old umbrella"];
const LESSONS: &[&str] = &[
    "it is good to ask for help",
    "a friend is the best treasure",
    "it pays to be patient",
    "small hands can do big things",
    "sharing makes everything better",
];
const QUALITIES: &[&str] = &["brave", "kind", "clever", "patient", "generous"];

const OPENINGS: &[&str] = &[
    "Once upon a time, there was {a trait} {kind} named {name}. {Name} lived in {a place} and had {a color} {thing}.",
    "Once upon a time, there was {a kind} called {name} who lived in {a place}. {She} was {trait}, and {she} loved {hers} {color} {thing} more than anything.",
    "In {a place} far away lived {name}, {a trait} {kind}. Every day {she} played with {hers} {color} {thing} {spot}.",
];
const WISHES: &[&str] = &[
    "{Time}, {weather}, and the {thing} {loss}. {Name} was very {feeling}.",
    "{Time}, while {weather}, something bad happened: the {thing} {loss}. \"Oh no!\" cried {name}. {She} felt {feeling}.",
    "But {weather} that day, and the {color} {thing} {loss}. {Name} sat down {spot} and felt {feeling}.",
];
const FAILURES: &[&str] = &[
    "{She} tried to fix it alone, but it did not work. {She} tried {number} times and then {she} stopped.",
    "{Name} ran through the whole {place} to find help, but nobody was at home.",
    "First {she} thought about it for a while. Then {she} tried it with {hers} bare hands, but that only made it worse.",
];
const HELPS: &[&str] = &[
    "Then an old {helper} came along. \"Why are you so {feeling}?\" asked the {helper}. {Name} told the {helper} everything.",
    "Just then, {name} heard a soft voice. It was {a helper}. \"I can help you,\" said the {helper}, \"if you share your {food} with me.\"",
    "A friendly {helper} who lived {spot} saw what had happened. \"Do not be {feeling},\" said the {helper}. \"I have {tool}.\"",
];
const SOLUTIONS: &[&str] = &[
    "Together they took {tool} and worked until it was dark. In the end, the {color} {thing} was as good as new.",
    "The {helper} fetched {tool}, and {name} held it tight. One, two, three, and the {thing} was back!",
    "With {tool} and a little luck, {name} and the {helper} saved the {thing}. \"Hooray!\" they shouted.",
];
const ENDINGS: &[&str] = &[
    "{Name} thanked the {helper}, and they ate {food} together. That day {name} learned that {lesson}.",
    "From that day on, {name} and the {helper} were best friends. They knew that {lesson}.",
    "\"Thank you,\" said {name}. \"You are so {quality}!\" The {helper} laughed, and they went home to the {place}. The end.",
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn stories_are_whole_varied_and_the_same_every_time() {
        let stories: Vec<String> = Stories::new(0).take(2000).collect();
        assert_eq!(stories[1234], story(0, 1234));
        assert_ne!(stories[0], story(1, 0));
        let distinct: HashSet<&String> = stories.iter().collect();
        assert_eq!(distinct.len(), stories.len());
        for story in &stories {
            assert!(!story.contains(['{', '}']), "{story}");
            assert!((40..250).contains(&story.split_whitespace().count()), "{story}");
            for wrong in [" a a", " a e", " a i", " a o", " a honest", " an b", "  "] {
                assert!(!story.contains(wrong), "'{wrong}' in: {story}");
            }
        }
    }
}
