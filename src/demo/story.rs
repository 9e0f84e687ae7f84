//! A grammar of little stories.
//!
//! A story has a hero with a trait, a place, a wish or a mishap, a helper, an attempt that fails, one that works, and an end that
//! refers back to all of them: names, pronouns, objects and places agree throughout. That is what a small model can visibly
//! learn: after a few hundred steps it writes grammatical stories whose hero keeps their name.

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
        words.push((
            "number",
            dice.pick(&["two", "three", "four", "five", "seven", "nine", "ten"]).to_owned(),
        ));
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
    ("Rosa", true),
    ("Leo", false),
    ("Emma", true),
    ("Otto", false),
    ("Zoe", true),
    ("Hugo", false),
    ("Ella", true),
    ("Jack", false),
    ("Mia", true),
    ("Noah", false),
    ("Ruby", true),
    ("Theo", false),
    ("Clara", true),
    ("Oscar", false),
    ("Lily", true),
    ("Felix", false),
    ("Anna", true),
    ("Paul", false),
];
const KINDS: &[&str] = &[
    "girl", "boy", "fox", "bear", "rabbit", "mouse", "owl", "frog", "duck", "cat", "dog", "hedgehog",
    "squirrel", "turtle", "otter", "badger", "goose", "lamb", "pony", "beaver",
];
const TRAITS: &[&str] = &[
    "little",
    "brave",
    "shy",
    "curious",
    "clever",
    "kind",
    "sleepy",
    "cheerful",
    "stubborn",
    "gentle",
    "quick",
    "honest",
    "impatient",
    "young",
    "proud",
];
const COLORS: &[&str] = &[
    "red", "blue", "green", "yellow", "orange", "silver", "golden", "purple", "white", "brown", "striped",
    "old",
];
/// A treasure, and what happens to it.
const THINGS: &[(&str, &str)] = &[
    ("kite", "flew away over the trees"),
    ("boat", "drifted down the river"),
    ("lantern", "went out"),
    ("ball", "rolled down the hill"),
    ("bell", "lost its sound"),
    ("drum", "broke"),
    ("hat", "was blown into a tree"),
    ("key", "fell into the well"),
    ("book", "got wet in the rain"),
    ("blanket", "tore on a branch"),
    ("basket", "fell into the stream"),
    ("wagon", "lost a wheel"),
    ("map", "was carried off by the wind"),
    ("flute", "would not play"),
    ("clock", "stopped"),
    ("scarf", "got caught in the gate"),
    ("ring", "slipped through a crack"),
    ("cup", "broke in half"),
];
/// A place, and a spot in it.
const PLACES: &[(&str, &str)] = &[
    ("forest", "under the tall oak"),
    ("village", "by the old bridge"),
    ("valley", "near the waterfall"),
    ("garden", "behind the rose bush"),
    ("meadow", "beside the quiet pond"),
    ("town", "next to the bakery"),
    ("harbor", "at the end of the pier"),
    ("castle", "at the foot of the tower"),
    ("farm", "behind the barn"),
    ("mountain", "in a small cave"),
    ("island", "on the sandy beach"),
    ("orchard", "among the apple trees"),
];
const FEELINGS: &[&str] = &["sad", "worried", "upset", "lonely", "angry", "tired", "afraid", "unhappy"];
const TIMES: &[&str] = &[
    "One morning",
    "One day",
    "One evening",
    "On a Sunday",
    "Early one day",
    "Late one night",
    "After breakfast",
    "On the first day of spring",
    "In the middle of the summer",
    "Just before dinner",
];
const WEATHERS: &[&str] = &[
    "the sun was shining",
    "it was raining",
    "the wind was strong",
    "snow was falling",
    "the sky was gray",
    "the fog was thick",
    "the stars were bright",
    "a storm was coming",
];
const FOODS: &[&str] = &[
    "warm bread",
    "apple pie",
    "honey cakes",
    "berry soup",
    "cheese",
    "pancakes",
    "ripe plums",
    "nuts and raisins",
    "hot tea",
    "pumpkin stew",
];
const TOOLS: &[&str] = &[
    "a long rope",
    "a wooden ladder",
    "a strong net",
    "a ball of string",
    "an old umbrella",
    "a bucket",
    "a sharp stick",
    "a pot of glue",
    "a needle and thread",
    "a magnet",
    "a broom",
    "a pair of oars",
];
const LESSONS: &[&str] = &[
    "it is good to ask for help",
    "a friend is the best treasure",
    "it pays to be patient",
    "small hands can do big things",
    "sharing makes everything better",
    "you should never give up too soon",
    "being kind is never a waste",
    "two can do what one cannot",
    "mistakes are a way to learn",
    "it is best to tell the truth",
];
const QUALITIES: &[&str] = &["brave", "kind", "clever", "patient", "generous", "strong", "helpful", "wise"];

const OPENINGS: &[&str] = &[
    "Once upon a time, there was {a trait} {kind} named {name}. {Name} lived in {a place} and had {a color} {thing}.",
    "Once upon a time, there was {a kind} called {name} who lived in {a place}. {She} was {trait}, and {she} loved {hers} {color} {thing} more than anything.",
    "In {a place} far away lived {name}, {a trait} {kind}. Every day {she} played with {hers} {color} {thing} {spot}.",
    "{Name} was {a trait} {kind}. {She} lived in {a place} with {hers} friend {friend}, and together they had {a color} {thing}.",
    "There once was {a trait} {kind}. {Hers} name was {name}, and {hers} home was {spot} in the {place}. {She} had only one toy, {a color} {thing}.",
    "{Time}, {a trait} {kind} named {name} found {a color} {thing} {spot}. From then on {she} took it everywhere in the {place}.",
];
const WISHES: &[&str] = &[
    "{Time}, {weather}, and the {thing} {loss}. {Name} was very {feeling}.",
    "{Time}, while {weather}, something bad happened: the {thing} {loss}. \"Oh no!\" cried {name}. {She} felt {feeling}.",
    "But {weather} that day, and the {color} {thing} {loss}. {Name} sat down {spot} and felt {feeling}.",
    "{Name} wanted to show the {thing} to {friend}. But on the way the {thing} {loss}, and {she} was {feeling}.",
    "{Friend} came to visit, and they played for a long time. Then the {thing} {loss}. They were both {feeling}.",
];
const FAILURES: &[&str] = &[
    "{She} tried to fix it alone, but it did not work. {She} tried {number} times and then {she} stopped.",
    "{Name} ran through the whole {place} to find help, but nobody was at home.",
    "First {she} thought about it for a while. Then {she} tried it with {hers} bare hands, but that only made it worse.",
    "\"I can do it by myself,\" said {name}. But after {number} tries {she} was out of breath.",
    "{Friend} wanted to help, but {friend} had no idea what to do.",
];
const HELPS: &[&str] = &[
    "Then an old {helper} came along. \"Why are you so {feeling}?\" asked the {helper}. {Name} told the {helper} everything.",
    "Just then, {name} heard a soft voice. It was {a helper}. \"I can help you,\" said the {helper}, \"if you share your {food} with me.\"",
    "A friendly {helper} who lived {spot} saw what had happened. \"Do not be {feeling},\" said the {helper}. \"I have {tool}.\"",
    "{Friend} knew a wise {helper}. So they went to see the {helper} and brought some {food}.",
    "At last {she} met {a helper} who was eating {food}. \"Please help me,\" said {name}. The {helper} nodded and smiled.",
];
const SOLUTIONS: &[&str] = &[
    "Together they took {tool} and worked until it was dark. In the end, the {color} {thing} was as good as new.",
    "The {helper} fetched {tool}, and {name} held it tight. One, two, three, and the {thing} was back!",
    "With {tool} and a little luck, {name} and the {helper} saved the {thing}. \"Hooray!\" they shouted.",
    "It took them {number} hours and {tool}. But {name} was {quality}, and soon {she} held the {color} {thing} again.",
    "The {helper} had a plan. {Name} used {tool} while the {helper} counted to {number}. And it worked!",
];
const ENDINGS: &[&str] = &[
    "{Name} thanked the {helper}, and they ate {food} together. That day {name} learned that {lesson}.",
    "From that day on, {name} and the {helper} were best friends. They knew that {lesson}.",
    "\"Thank you,\" said {name}. \"You are so {quality}!\" The {helper} laughed, and they went home to the {place}. The end.",
    "When {she} went to bed that night, {name} put the {thing} beside {her} and smiled. {She} had learned that {lesson}.",
    "{Friend} and {name} danced around the {thing}, and everyone in the {place} was happy. And {name} never forgot that {lesson}.",
    "Then they all shared {food} {spot}. \"Now I know that {lesson},\" said {name}. The end.",
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
