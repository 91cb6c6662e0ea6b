//! Tests of the reader of ggml's sources and of the table.

use std::collections::BTreeMap;

use super::constructors::{ENUMS, Indices, constants, precisions, written};
use super::table::Since;
use super::{Build, Table, Written};

const SETTERS: &str = "\
static struct ggml_tensor * ggml_glu_impl(struct ggml_tensor * a, enum ggml_glu_op op) {
    ggml_set_op_params_i32(result, 0, (int32_t) op);
    result->op = GGML_OP_GLU;
}

struct ggml_tensor * ggml_swiglu_oai(
        struct ggml_tensor * a, float limit) {
    struct ggml_tensor * result = ggml_glu_impl(a, GGML_GLU_OP_SWIGLU_OAI);
    ggml_set_op_params_f32(result, 3, limit); // the limit
}

bool ggml_prec_set_src(struct ggml_tensor * a, int idx) {
    switch (a->op) {
        case GGML_OP_MUL_MAT:
        case GGML_OP_MUL_MAT_ID:
            {
                if (idx != 1) {
                    return false;
                }
                ggml_set_op_params_i32(a, 2 + idx, prec);
            }
            break;
        case GGML_OP_FLASH_ATTN_EXT:
            ggml_set_op_params_i32(a, 5, prec);
    }
}

static struct ggml_tensor * ggml_view_impl(struct ggml_tensor * a, size_t offset) {
    ggml_set_op_params(result, &offset, sizeof(offset));
    result->op = GGML_OP_VIEW;
}

struct ggml_tensor * ggml_win(struct ggml_tensor * a, int w) {
    int32_t params[] = { npx, npy,
        w };
    ggml_set_op_params(result, params, sizeof(params));
    result->op = GGML_OP_WIN_PART;
}

void ggml_compute_backward(void) {
    case GGML_OP_SCALE:
        memcpy(&s, tensor->op_params, sizeof(float));
}
";

/// The least number of words and sources is that of a whole file.
fn many() -> String {
    let functions = (0..101).map(|i| {
        format!(
            "void f{i}(struct t * a) {{\n    ggml_set_op_params_i32(a, {i}, 0);\n    \
                 a->src[{i}] = x;\n    a->op = GGML_OP_TEST;\n}}\n"
        )
    });
    functions.collect()
}

#[test]
fn every_way_to_write_a_word_is_read() {
    let mut words = written(&format!("{SETTERS}{}", many())).unwrap().words;
    words.retain(|(op, _)| op != "TEST");
    let expected = [
        ("FLASH_ATTN_EXT", 5),
        ("GLU", 0),
        ("GLU", 3),
        ("MUL_MAT", 3),
        ("MUL_MAT_ID", 3),
        ("VIEW", 0),
        ("VIEW", 1),
        ("WIN_PART", 0),
        ("WIN_PART", 1),
        ("WIN_PART", 2),
    ];
    let expected = expected.map(|(op, word)| (op.to_owned(), word));
    assert_eq!(words, Indices::from(expected));
    let unknown = SETTERS.replace("2 + idx", "2 + other");
    assert!(written(&format!("{unknown}{}", many())).is_err());
}

const SOURCES: &str = "\
struct ggml_tensor * ggml_post(struct ggml_tensor * x, struct ggml_tensor * comb) {
    if (comb) {
        GGML_ASSERT(comb->ne[3] == 1);
    }
    result->op     = GGML_OP_POST;
    result->src[0] = x;
    result->src[3] = comb; // or null
}

void ggml_add_sinks(struct ggml_tensor * a, struct ggml_tensor * sinks) {
    GGML_ASSERT(a->op == GGML_OP_ATTN);
    GGML_ASSERT(a->src[4] == NULL);
    if (!sinks) {
        a->src[4] = NULL;
        return;
    }
    a->src[4] = sinks;
}

void ggml_copy(struct ggml_tensor * from, struct ggml_tensor * to) {
    to->src[i] = from->src[i];
}
";

#[test]
fn sources_are_read_and_whether_they_may_be_null() {
    let read = |text: &str| {
        let mut written = written(&format!("{text}{}", many())).unwrap();
        written.sources.retain(|(op, _)| op != "TEST");
        written
    };
    let indices = |all: &[(&str, usize)]| -> Indices {
        all.iter()
            .map(|&(op, index)| (op.to_owned(), index))
            .collect()
    };
    let found = read(SOURCES);
    assert_eq!(
        found.sources,
        indices(&[("ATTN", 4), ("POST", 0), ("POST", 3)])
    );
    assert_eq!(found.nullable, indices(&[("ATTN", 4), ("POST", 3)]));
    let found = read(&SOURCES.replace("if (comb) {", "{"));
    assert_eq!(found.nullable, indices(&[("ATTN", 4)]));
}

#[test]
fn values_of_the_enum_are_read() {
    let header = "\
    enum ggml_prec {
        GGML_PREC_DEFAULT =  0, // note
        GGML_PREC_F32     = 10,
    };
";
    let expected = [("DEFAULT".to_owned(), 0), ("F32".to_owned(), 10)];
    assert_eq!(precisions(header).unwrap(), BTreeMap::from(expected));
    assert!(precisions(&header.replace("10", "NEW")).is_err());
    assert!(precisions("").is_err());
}

#[test]
fn constants_are_read_and_compared() {
    let mut header = "#define GGML_ROPE_TYPE_NEOX   2 // note\n".to_owned();
    for name in ENUMS {
        header += &format!(
            "    enum {name} {{\n        {name}_A,\n        {name}_B = (1 << 8),\n    }};\n"
        );
    }
    let read = constants(&header).unwrap();
    assert_eq!(read.len(), 2 * ENUMS.len() + 1);
    let value = |name: &str| read.get(name).map(String::as_str);
    assert_eq!(value("ggml_op_pool_A"), Some("0"));
    assert_eq!(value("ggml_op_pool_B"), Some("(1 << 8)"));
    assert_eq!(value("GGML_ROPE_TYPE_NEOX"), Some("2"));
    assert!(constants(&header.replace("enum ggml_tri_type", "enum tri")).is_err());
    assert!(constants(&header.replace("TYPE_NEOX", "NEOX")).is_err());

    let mut newest = build(26, &[]);
    newest.constants = read;
    let mut older = newest.clone();
    older.constants.insert("ggml_op_pool_B".into(), "2".into());
    older.constants.remove("ggml_op_pool_A");
    let since = Since {
        some: 23,
        every: 24,
    };
    let table = Table {
        added: BTreeMap::new(),
        optional: BTreeMap::new(),
        precisions: since,
        precision_values: BTreeMap::from([("F32".to_owned(), 10)]),
        hc_pre_has_parameters: 25,
    };
    assert_eq!(table.contradictions(&newest, &newest), [""; 0]);
    assert_eq!(
        table.contradictions(&newest, &older),
        [
            "ggml_op_pool_A is nothing under 0.26, and 0 in the newest build",
            "ggml_op_pool_B is 2 under 0.26, and (1 << 8) in the newest build",
        ]
    );
}

/// A build under the number 0.`minor`.
fn build(minor: u32, words: &[usize]) -> Build {
    Build {
        minor,
        written: Written {
            words: words.iter().map(|&word| ("OP".to_owned(), word)).collect(),
            ..Written::default()
        },
        precisions: BTreeMap::from([("F32".to_owned(), 10)]),
        constants: BTreeMap::new(),
    }
}

#[test]
fn contradictions_of_a_build_are_named() {
    let since = Since {
        some: 23,
        every: 24,
    };
    let table = Table {
        added: BTreeMap::from([(("OP".to_owned(), 3), since)]),
        optional: BTreeMap::new(),
        precisions: since,
        precision_values: BTreeMap::from([("F32".to_owned(), 10), ("Q8".to_owned(), 30)]),
        hc_pre_has_parameters: 25,
    };
    let newest = build(26, &[0, 3]);
    let found = |minor, words: &[usize]| {
        let mut found = table.contradictions(&newest, &build(minor, words));
        found.retain(|line| !line.contains("GGML_PREC_Q8"));
        found
    };
    for (minor, words) in [(22, &[0][..]), (23, &[0]), (23, &[0, 3]), (24, &[0, 3])] {
        assert_eq!(found(minor, words), [""; 0], "0.{minor} {words:?}");
    }
    assert_eq!(
        found(22, &[0, 3]),
        ["word 3 of OP is written under 0.22, in the table from 0.23 on"]
    );
    assert_eq!(found(24, &[0]), ["word 3 of OP is not written under 0.24"]);
    assert_eq!(found(22, &[]), ["word 0 of OP is not written under 0.22"]);
    assert_eq!(
        found(27, &[0, 3, 5]),
        ["word 5 of OP is new: it is in no entry of the table"]
    );
    let mut other = build(24, &[0, 3]);
    other.precisions.insert("F32".into(), 11);
    other.precisions.insert("Q2".into(), 50);
    assert_eq!(
        table.contradictions(&newest, &other),
        [
            "GGML_PREC_F32 is 11, and 10 in the plugin",
            "GGML_PREC_Q2 is new, with the value 50",
            "GGML_PREC_Q8 is not there under 0.24",
        ]
    );
}

#[test]
fn table_of_the_plugin_is_read() {
    let table = Table::of_workspace().unwrap();
    let added = |op: &str, word| table.added.get(&(op.to_owned(), word)).copied();
    let since = |some| {
        Some(Since {
            some,
            every: some + 1,
        })
    };
    assert_eq!(added("MUL_MAT_ID", 3), since(23));
    assert_eq!(added("DSV4_HC_PRE", 1), since(24));
    assert_eq!(added("ROPE", 15), since(20));
    assert_eq!(
        table.optional.get(&("DSV4_HC_POST".into(), 3)).copied(),
        since(24)
    );
    assert_eq!(
        (Some(table.precisions), table.hc_pre_has_parameters),
        (since(23), 25)
    );
    assert_eq!(table.precision_values.get("Q4"), Some(&40));
    assert!(Table::parse("", "", "").is_err());
}
