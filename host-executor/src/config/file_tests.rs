//! What files say, and what is wrong with them.

use super::*;
use crate::engine::EngineKind;

/// The example that is installed, which a user starts from.
const EXAMPLE: &str = include_str!("../../../deploy/host/vgpu.toml");

fn refused(text: &str) -> (usize, usize, String) {
    let problem = parse(text).expect_err(text);
    (problem.line, problem.column, problem.reason)
}

#[test]
fn empty_file_gives_the_defaults() {
    assert_eq!(parse(""), Ok(Settings::default()));
    assert_eq!(parse("# nothing\n[server]\n"), Ok(Settings::default()));
}

/// The example with the settings that are commented out in it. A comment begins with `# `.
fn whole_example() -> String {
    let lines = EXAMPLE.lines().map(|line| match line.strip_prefix('#') {
        Some(setting) if setting.starts_with("[[") => setting,
        Some(setting) if !setting.starts_with(' ') && setting.contains(" = ") => setting,
        _ => line,
    });
    lines.flat_map(|line| [line, "\n"]).collect()
}

/// The file is installed as it is: it must promise no memory, and name no user of the host.
#[test]
fn example_has_no_guests_as_it_is() {
    let settings = parse(EXAMPLE).expect("the example is good");
    assert!(settings.guests.is_empty());
    assert_eq!(settings.unnamed, Some(Policy::default()));
    assert_eq!((settings.memory, settings.certs), (None, None));
    assert_eq!(settings.weights_cache, None);
    // A second executor, started by hand, reads the file as well.
    assert_eq!((settings.metrics, settings.control), (None, None));
}

#[test]
fn example_has_the_documented_values() {
    let settings = parse(&whole_example()).expect("the example is good");
    let names: Vec<&str> = settings
        .guests
        .iter()
        .map(|g| g.rule.name.as_str())
        .collect();
    assert_eq!(names, ["alice", "batch", "vm1"]);
    let [alice, batch, vm1] = settings.guests.as_slice() else {
        panic!("three guests");
    };
    assert_eq!(alice.rule.policy.memory, Some(24 << 30));
    assert_eq!((alice.rule.policy.weight, batch.rule.policy.weight), (3, 1));
    assert_eq!(
        alice.listen,
        [Endpoint::Unix("/run/vgpu/alice.sock".into())]
    );
    assert_eq!(batch.rule.uids, [1001]);
    assert_eq!(batch.rule.policy.graphs_in_flight, 1);
    let vm = vm1.vm.as_ref().expect("a virtual machine");
    assert_eq!((vm.name.as_str(), vm.window), ("vm1", 256 << 20));
    assert_eq!(vm1.rule.policy.links, [LinkKind::Pci]);
    assert!(settings.control.is_some());
    // The exporter of NVIDIA's metrics has 9400.
    let metrics = settings.metrics.expect("metrics").to_string();
    assert!(!metrics.ends_with(":9400"), "{metrics}");
    assert!(!settings.overcommit);
}

/// Every setting that is commented out in the example exists, and has the value that it shows.
#[test]
fn settings_omitted_from_the_example_exist() {
    let all = whole_example();
    assert_ne!(all, EXAMPLE);
    let plain = parse(EXAMPLE).unwrap();
    let settings = parse(&all).expect("every setting of the example is one");
    assert_eq!(settings.max_guests, plain.max_guests);
    assert_eq!(settings.mode, plain.mode);
    assert!(settings.certs.is_some());
}

#[test]
fn metrics_for_other_machines_need_a_key() {
    let remote = "[metrics]\nlisten = \"0.0.0.0:9400\"\n";
    let (_, _, reason) = refused(remote);
    assert!(reason.contains("metrics.allow-remote"), "{reason}");
    let settings = parse(&format!("{remote}allow-remote = true\n")).expect("it is allowed");
    assert_eq!(settings.metrics, "0.0.0.0:9400".parse().ok());
    assert!(settings.metrics_allow_remote);
}

#[test]
fn errors_contain_line_and_column() {
    let mut wrong = String::new();
    for (text, place, words) in [
        ("[engine]\nkind = \"tpu\"\n", (2, 8), "expected cpu, cuda"),
        ("[engine]\nthreads = -1\n", (2, 11), "-1"),
        ("[engine]\nmemory = \"8X\"\n", (2, 10), "unknown unit"),
        ("[engine]\nmemory = true\n", (2, 10), "a size, such as"),
        ("[engine]\ncolour = 1\n", (2, 1), "unknown field `colour`"),
        ("[motor]\n", (1, 2), "unknown field `motor`"),
        (
            "[server]\nlisten = [\"unix:/a\", \"unix:/a\"]\n",
            (2, 22),
            "already a listening address",
        ),
        (
            "[server]\nlisten = [\"pci\"]\n",
            (2, 11),
            "cannot listen on",
        ),
        ("[server]\nmode = \"0999\"\n", (2, 8), "not a socket mode"),
        (
            "[metrics]\nlisten = \"0.0.0.0:9400\"\n",
            (2, 10),
            "other machines",
        ),
        ("[metrics]\nlisten = \"here\"\n", (2, 10), "not an address"),
        ("a = \"b\n", (1, 7), "string"),
        ("[[guest]]\nmemory = 1\n", (1, 1), "missing field `name`"),
        ("[[guest]]\nname = \"a b\"\n", (2, 8), "letters, digits"),
        (
            "\n[[guest]]\nname = \"a\"\n",
            (2, 1),
            "nothing identifies guest",
        ),
        (
            "[[guest]]\nname = \"a\"\nuids = [1]\n[[guest]]\nname = \"a\"\nuids = [2]\n",
            (5, 8),
            "two guests have the name",
        ),
        (
            "[[guest]]\nname = \"a\"\nuids = [1]\n[[guest]]\nname = \"b\"\nuids = [3, 1]\n",
            (6, 12),
            "user 1 already identifies guest a",
        ),
        (
            "[[guest]]\nname = \"a\"\nuids = [1]\nweight = 0\n",
            (4, 10),
            "from 1 to 1000",
        ),
        (
            "[[guest]]\nname = \"a\"\nuids = [1]\ngraphs-in-flight = 0\n",
            (4, 20),
            "at least 1",
        ),
        (
            "[[guest]]\nname = \"a\"\nlinks = [\"usb\"]\n",
            (3, 9),
            "unknown kind of link",
        ),
        (
            "[[guest]]\nname = \"a\"\nvm = { socket = \"s\" }\n",
            (3, 6),
            "absolute",
        ),
        (
            "[[guest]]\nname = \"ä\"\nvm = { socket = \"/s\", fenster = 1 }\n",
            (3, 23),
            "fenster",
        ),
    ] {
        let (line, column, reason) = refused(text);
        if !reason.contains(words) || (line, column) != place {
            wrong.push_str(&format!(
                "{text}expected {place:?} {words:?}\n{line}:{column}: {reason}\n\n"
            ));
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}

#[test]
fn columns_are_counted_in_characters() {
    let (line, column, _) = refused("[server]\nlog = \"äöü\"; x\n");
    assert_eq!((line, column), (2, 12));
}

#[test]
fn settings_that_need_a_restart_are_reported() {
    let running = parse("[engine]\nthreads = 2\n[[guest]]\nname = \"a\"\nuids = [1]\n").unwrap();
    let live =
        parse("[engine]\nthreads = 2\n[[guest]]\nname = \"a\"\nuids = [2]\nweight = 7\n").unwrap();
    assert!(live.needs_restart(&running).is_empty());
    let other = parse("[engine]\nthreads = 3\npin = true\nkind = \"cpu\"\n").unwrap();
    assert_eq!(
        other.needs_restart(&running),
        ["engine.kind", "engine.threads", "engine.pin"]
    );
    let mut kept = other.clone();
    kept.keep_until_restart(&running);
    assert_eq!((kept.threads.count, kept.threads.pin), (2, false));
}

#[test]
fn excessive_quotas_are_refused_unless_overcommitment_is_set() {
    let guests = "[[guest]]\nname = \"a\"\nuids = [1]\nmemory = 60\n[[guest]]\nname = \"b\"\nuids \
     = [2]\nmemory = 60\n";
    let rules = parse(guests).unwrap().rules();
    let error = rules.check_memory(0, 100).unwrap_err().to_string();
    assert!(error.contains("120 B, the engine has 100 B"), "{error}");
    assert!(rules.check_memory(0, 120).is_ok());
    let rules = parse(&format!("[server]\novercommit = true\n{guests}"))
        .unwrap()
        .rules();
    assert!(rules.check_memory(0, 100).is_ok());
}

#[test]
fn engines_and_the_devices_of_guests_are_read() {
    let engines = |text: &str| {
        let settings = parse(&format!("[engine]\nkind = {text}\n"));
        settings.map(|settings| settings.engines.to_string())
    };
    assert_eq!(engines("\"cuda:0,2\"").unwrap(), "cuda:0, cuda:2");
    let array = "[\"cuda:1\", \"cpu\"]";
    assert_eq!(engines(array).unwrap(), "cuda:1, cpu");
    for (text, reason) in [
        ("[]", "no engine is named"),
        ("[\"cuda:1\", \"gpu\"]", "expected cpu, cuda,"),
        ("3", "an engine, such as"),
    ] {
        let problem = engines(text).unwrap_err();
        assert!(problem.reason.contains(reason), "{text}: {problem}");
        assert_eq!(problem.line, 2, "{text}");
    }

    let guest = |kind: &str, devices: &str| {
        parse(&format!(
            "[engine]\nkind = \"{kind}\"\n[[guest]]\nname = \"a\"\nuids = [1]\n\
             devices = {devices}\n"
        ))
    };
    let read = guest("cuda:all", "[2, 0]").unwrap();
    assert_eq!(read.rules().guests[0].policy.devices, [2, 0]);
    assert_eq!(read.check_devices(), Ok(()));
    let rules = read.rules();
    assert_eq!(rules.check_devices(3), Ok(()));
    let error = rules.check_devices(2).unwrap_err().to_string();
    assert!(error.contains("device 2, counted from 0"), "{error}");
    for (devices, reason) in [("[]", "no device"), ("[1, 1]", "device 1 occurs twice")] {
        let problem = guest("cpu", devices).unwrap_err();
        assert!(problem.reason.contains(reason), "{devices}: {problem}");
        assert_eq!(problem.line, 6, "{devices}");
    }
    // `auto` may leave a GPU out, which would shift the numbers.
    let error = guest("auto", "[1]").unwrap().check_devices();
    let error = error.unwrap_err().to_string();
    assert!(error.contains("name the engines"), "{error}");
}

/// The settings of guests with these keys: alice, bob, and unnamed guests.
fn with_engines(kind: &str, [alice, bob, unnamed]: [&str; 3]) -> Result<Settings, Problem> {
    parse(&format!(
        "[engine]\nkind = {kind}\n[[guest]]\nname = \"alice\"\nuids = [1]\n{alice}\n\
         [[guest]]\nname = \"bob\"\nuids = [2]\n{bob}\n[unnamed]\n{unnamed}\n"
    ))
}

fn kinds(names: &[&str]) -> Vec<EngineKind> {
    let parsed = names.iter().map(|name| name.parse().expect("an engine"));
    parsed.collect()
}

#[test]
fn engines_of_guests_are_read_by_their_class() {
    let both = "[\"cpu\", \"cuda:all\"]";
    let keys = ["engine = \"cuda\"", "", "engine = \"cpu\""];
    let settings = with_engines(both, keys).unwrap();
    assert_eq!(settings.check_engines(), Ok(()));
    // No number is given, and none is known before the engines are chosen.
    assert_eq!(settings.check_devices(), Ok(()));
    assert!(settings.devices_of("alice").is_empty());
    let engines = kinds(&["cpu", "cuda:0", "cuda:1"]);
    let settings = settings.on_engines(&engines).unwrap();
    assert_eq!(settings.devices_of("alice"), [1, 2]);
    assert!(settings.devices_of("bob").is_empty(), "bob has all");
    let unnamed = settings.unnamed.as_ref().map(|policy| &policy.devices[..]);
    assert_eq!(unnamed, Some(&[0][..]));
    // On other engines, as after a restart.
    let settings = settings.on_engines(&kinds(&["cuda:0", "cpu"])).unwrap();
    assert_eq!(settings.devices_of("alice"), [0]);
    let settings = Settings {
        unnamed: None,
        ..with_engines("\"auto\"", ["engine = \"auto\"", "", ""]).unwrap()
    };
    let settings = settings.on_engines(&kinds(&["cpu", "ggml:/a.so"])).unwrap();
    assert_eq!(settings.devices_of("alice"), [1]);

    for (key, reason) in [
        ("engine = \"tpu\"", "expected cuda, ggml, cpu or auto"),
        ("engine = \"cuda:0\"", "expected cuda, ggml, cpu or auto"),
        (
            "engine = \"cpu\"\ndevices = [0]",
            "`engine` and `devices` exclude each other",
        ),
    ] {
        let problem = with_engines(both, [key, "", ""]).unwrap_err();
        assert!(problem.reason.contains(reason), "{key}: {problem}");
        assert_eq!((problem.line, problem.column), (6, 10), "{key}");
        let problem = with_engines(both, ["", "", key]).unwrap_err();
        assert!(problem.reason.contains(reason), "{key}: {problem}");
    }
}

#[test]
fn class_of_engines_that_there_are_not_is_refused_with_the_guest_and_the_engines() {
    let cpu = "engine = \"cpu\"";
    for (kind, keys, engines, said) in [
        (
            "\"cuda:all\"",
            ["", cpu, ""],
            &["cuda:0"][..],
            "guest \"bob\" has engine = \"cpu\", and there is no such engine, only cuda",
        ),
        (
            "[\"cpu\", \"ggml:/a.so:V0\"]",
            [cpu, "", "engine = \"cuda\""],
            &["cpu", "ggml:/a.so:V0"],
            "[unnamed] has engine = \"cuda\", and there is no such engine, only cpu, \
             ggml:/a.so:V0: name one",
        ),
    ] {
        let settings = with_engines(kind, keys).unwrap();
        let named = settings.check_engines().unwrap_err().to_string();
        assert!(named.contains(said), "{named}");
        let chosen = settings.on_engines(&kinds(engines)).unwrap_err();
        assert!(chosen.to_string().contains(said), "{chosen}");
    }
    // Only the choice of the engines shows it.
    let settings = with_engines("\"auto\"", ["engine = \"ggml\"", "", ""]).unwrap();
    assert_eq!(settings.check_engines(), Ok(()));
    assert!(settings.gives_ggml());
    let error = settings.on_engines(&kinds(&["cpu"])).unwrap_err();
    assert_eq!(error.engines, kinds(&["cpu"]));
    // Unnamed guests that are rejected need no engine.
    let rejected = ["", "", "accept = false\nengine = \"cuda\""];
    let settings = with_engines("\"cpu\"", rejected).unwrap();
    assert_eq!(settings.check_engines(), Ok(()));
    assert!(settings.on_engines(&kinds(&["cpu"])).is_ok());
}

/// After a change of `engine.kind`, numbers mean other engines than those that run. A class does
/// not.
#[test]
fn only_numbers_of_devices_are_renumbered_by_other_engines() {
    let one = kinds(&["cpu"]);
    let settings = |kind: &str, key: &str| {
        let settings = with_engines(kind, [key, "", ""]).unwrap();
        settings.on_engines(&one).unwrap()
    };
    let running = settings("\"cpu\"", "");
    let other = "[\"cpu\", \"cuda:0\"]";
    assert!(settings(other, "devices = [0]").renumbers_devices(&running));
    assert!(!settings("\"cpu\"", "devices = [0]").renumbers_devices(&running));
    assert!(!settings(other, "engine = \"cpu\"").renumbers_devices(&running));
    let of_class = settings("\"cpu\"", "engine = \"cpu\"");
    assert!(!settings(other, "engine = \"auto\"").renumbers_devices(&of_class));
    assert!(settings(other, "devices = [0]").renumbers_devices(&of_class));
}

proptest::proptest! {
    #[test]
    fn no_text_panics(text in "\\PC{0,200}") {
        let _ = parse(&text);
    }

    #[test]
    fn no_part_of_the_example_panics(cut in 0..EXAMPLE.len(), splice in "[\\]\\[\"=#\n \
     a-z0-9{}]{0,6}") {
        if EXAMPLE.is_char_boundary(cut) {
            let text = format!("{}{splice}{}", &EXAMPLE[..cut], &EXAMPLE[cut..]);
            if let Err(problem) = parse(&text) {
                let line = text.split('\n').nth(problem.line - 1).expect("a line of the text");
                assert!(problem.column <= line.chars().count() + 1, "{problem}");
                assert!(!problem.reason.is_empty());
            }
        }
    }
}
