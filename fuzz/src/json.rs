//! Mutations of JSON that keep it valid JSON: without them the text parser rejects nearly every
//! input, and the code behind it is hardly tested.

use libfuzzer_sys::fuzzer_mutate;
use serde_json::{Value, json};

/// Mutates the text after the first `skip` bytes; in half of the calls as JSON, if it is valid.
///
/// For [`libfuzzer_sys::fuzz_mutator`]: returns the new size.
pub fn mutate(data: &mut [u8], size: usize, size_max: usize, seed: u32, skip: usize) -> usize {
    let mut random = Random(u64::from(seed));
    if random.below(2) == 0
        && let Some(text) = data.get(skip..size)
        && let Ok(mut root) = serde_json::from_slice(text)
    {
        for _ in 0..1 + random.below(3) {
            mutate_one(&mut root, &mut random);
        }
        let text = root.to_string();
        let size = skip + text.len();
        if size <= size_max {
            data[skip..size].copy_from_slice(text.as_bytes());
            return size;
        }
    }
    fuzzer_mutate(data, size, size_max)
}

fn mutate_one(root: &mut Value, random: &mut Random) {
    let mut pointers = Vec::new();
    collect(root, &mut String::new(), &mut pointers);
    let pointer = &pointers[random.below(pointers.len())];
    let other = &pointers[random.below(pointers.len())];
    let other = root.pointer(other).expect("it was just there").clone();
    let node = root.pointer_mut(pointer).expect("it was just there");
    match node {
        Value::Array(items) if !items.is_empty() && random.below(3) > 0 => {
            let (from, to) = (random.below(items.len()), random.below(items.len()));
            match random.below(4) {
                0 => drop(items.remove(from)),
                1 => items.insert(to, items[from].clone()),
                2 => items.insert(to, other),
                _ => items.swap(from, to),
            }
        }
        Value::Object(members) if !members.is_empty() && random.below(3) > 0 => {
            let name = members.keys().nth(random.below(members.len()));
            let name = name.expect("fewer than there are").clone();
            if random.below(2) == 0 {
                members.remove(&name);
            } else {
                members.insert(name, other);
            }
        }
        Value::Number(number) if random.below(4) > 0 => {
            let step = 1u64 << random.below(24);
            let number = number.as_u64().unwrap_or_default();
            let numbers = [
                json!(number.wrapping_add(step)),
                json!(number.wrapping_sub(step)),
                json!(number.wrapping_mul(step)),
                json!(step),
                json!(0),
                json!(-1),
                json!(i64::MAX),
                json!(i64::MIN),
                json!(u64::MAX),
            ];
            *node = numbers[random.below(numbers.len())].clone();
        }
        _ => *node = other,
    }
}

/// The pointers (RFC 6901) of a value and of all values inside it.
fn collect(value: &Value, pointer: &mut String, pointers: &mut Vec<String>) {
    pointers.push(pointer.clone());
    let length = pointer.len();
    let mut descend = |name: &str, child: &Value| {
        pointer.push('/');
        pointer.push_str(&name.replace('~', "~0").replace('/', "~1"));
        collect(child, pointer, pointers);
        pointer.truncate(length);
    };
    match value {
        Value::Array(items) => {
            for (index, child) in items.iter().enumerate() {
                descend(&index.to_string(), child);
            }
        }
        Value::Object(members) => {
            for (name, child) in members {
                descend(name, child);
            }
        }
        _ => {}
    }
}

/// SplitMix64: a mutation must be determined by the seed that libFuzzer gives.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % bound as u64) as usize
    }
}
