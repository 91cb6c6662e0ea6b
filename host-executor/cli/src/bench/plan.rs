//! `vgpu bench plan`: the roofline of a model's plan, and its measured time.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, ensure};
use clap::{Parser, ValueEnum};
use serde::{Deserialize, Serialize};
use vgpu_check::Options;
use vgpu_check::model::{self, Built, Model, StepShape};
use vgpu_engine::roofline::{self, Cost, Rates};
use vgpu_engine::{Engine, NodeTiming};
use vgpu_transport::ir::{Graph, Type};

use vgpu_executor::engine;
use vgpu_executor::engine::EngineKind;

/// Shows the lower bound for the time of one step of a model on this engine, and the measured time,
/// by operator.
///
/// The model has random weights and the shapes of a known model; no file is needed. The lower bound
/// of a node is the time that the engine needs at least to read its bytes, or to compute its
/// operations, whichever is longer. Both peak rates are measured first, or given. Then the step
/// runs as for guests, and once more part by part. The times of the parts add up to more than the
/// time of the step, where parts overlap.
#[derive(Parser)]
pub(crate) struct Args {
    /// The engine, as for `vgpu serve`.
    #[arg(long, value_name = "ENGINE", default_value = "auto")]
    engine: EngineKind,

    /// Threads of the CPU engine; 0 for one per processor
    #[arg(long, value_name = "N", default_value_t = 0)]
    threads: usize,

    /// The model whose shapes are used
    #[arg(long, value_enum, default_value = "8b")]
    model: Shapes,

    /// The type of the matrices: q4_k_m, or a type by ggml's name. [default: q4_k_m; for
    /// gpt-oss-20b mxfp4 for experts and q8_0 for the rest]
    #[arg(long, value_name = "TYPE")]
    weights: Option<String>,

    /// The type of cached keys and values
    #[arg(long, value_name = "TYPE", default_value = "f16")]
    cache: String,

    /// Tokens of the step: 1 is decoding
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        value_parser = clap::value_parser!(u64).range(1..=65536)
    )]
    tokens: u64,

    /// Tokens in the cache before the step
    #[arg(
        long,
        value_name = "N",
        default_value_t = 0,
        value_parser = clap::value_parser!(u64).range(0..=1 << 20)
    )]
    past: u64,

    /// Number of runs, whole and part by part; medians are shown
    #[arg(
        long,
        value_name = "N",
        default_value_t = 5,
        value_parser = clap::value_parser!(u64).range(1..)
    )]
    repeats: u64,

    /// Also list all parts in execution order
    #[arg(long)]
    timeline: bool,

    /// Peak memory bandwidth in GB/s, instead of a measurement
    #[arg(long, value_name = "GB/S")]
    bandwidth: Option<f64>,

    /// Peak rate of products in TFLOPS, instead of a measurement
    #[arg(long, value_name = "TFLOPS")]
    tflops: Option<f64>,

    /// Do not run the step: show the lower bound only. Needs --bandwidth and --tflops, and no
    /// memory for the model
    #[arg(long, requires = "bandwidth", requires = "tflops")]
    floor_only: bool,

    /// Also write the figures to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Compare with the figures in this file, which --json has written. The exit status says
    /// whether the step is slower
    #[arg(long, value_name = "FILE")]
    against: Option<PathBuf>,

    /// How much slower the step may be than the earlier one, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = 10.0)]
    allow: f64,
}

/// Models with known shapes.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Shapes {
    /// 256 million parameters.
    #[value(name = "256m")]
    Dense256M,
    /// 1 billion, as Llama 3.2 1B.
    #[value(name = "1b")]
    Dense1B,
    /// 8 billion, as Llama 3 8B.
    #[value(name = "8b")]
    Dense8B,
    /// 70 billion, as Llama 3 70B.
    #[value(name = "70b")]
    Dense70B,
    /// 30 billion with 128 experts, 8 of them for a token, as Qwen3-30B-A3B.
    #[value(name = "30b-a3b")]
    Experts30B,
    /// 20 billion with 32 experts, 4 of them for a token, with the shapes of gpt-oss-20b, whose
    /// experts are MXFP4.
    #[value(name = "gpt-oss-20b")]
    Experts20B,
}

impl Shapes {
    fn name(self) -> String {
        let value = self.to_possible_value();
        value.map_or_else(String::new, |value| value.get_name().to_owned())
    }

    fn model(self) -> Model {
        match self {
            Shapes::Dense256M => model::DENSE_256M,
            Shapes::Dense1B => model::DENSE_1B,
            Shapes::Dense8B => model::DENSE_8B,
            Shapes::Dense70B => model::DENSE_70B,
            Shapes::Experts30B => model::EXPERTS_30B,
            Shapes::Experts20B => model::EXPERTS_20B,
        }
    }
}

/// llama.cpp's name for a mix of Q4_K and Q6_K.
const Q4_K_M: &str = "q4_k_m";

/// The number of keys of a graph is a multiple of this, as in llama.cpp.
const SEEN_STEP: u64 = 256;

/// Bytes of weights for measuring peak rates on the CPU: several times its caches.
const CPU_WEIGHTS: u64 = 256 << 20;

/// The figures of a run.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Figures {
    vgpu: String,
    engine: String,
    device: String,
    model: String,
    weights: String,
    cache: String,
    tokens: u64,
    past: u64,
    nodes: usize,
    /// Peak rates: bytes and operations per second.
    bandwidth: f64,
    operations: f64,
    total: Line,
    /// The median time of a step in seconds.
    seconds: Option<f64>,
    /// Figures by operator, the slowest first.
    by_op: Vec<Line>,
}

/// Figures of some nodes.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Line {
    name: String,
    nodes: usize,
    memory: u64,
    cached: u64,
    operations: u64,
    /// The lower bound in seconds.
    floor: f64,
    /// The measured time part by part, in seconds.
    seconds: Option<f64>,
}

impl Line {
    fn add(&mut self, nodes: usize, cost: &Cost, seconds: Option<f64>) {
        self.nodes += nodes;
        self.memory += cost.memory;
        self.cached += cost.cached;
        self.operations += cost.operations;
        self.seconds = match (self.seconds, seconds) {
            (Some(a), Some(b)) => Some(a + b),
            (a, b) => a.or(b),
        };
    }

    fn cost(&self) -> Cost {
        Cost {
            memory: self.memory,
            cached: self.cached,
            operations: self.operations,
        }
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let before = args.against.as_ref().map(|path| {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
        let figures: Figures = serde_json::from_str(&text)
            .with_context(|| format!("{} was not written by --json", path.display()))?;
        anyhow::Ok(figures)
    });
    let before = before.transpose()?;
    let step = StepShape {
        tokens: args.tokens,
        seen: (args.past + args.tokens).next_multiple_of(SEEN_STEP),
    };
    let model = model_of(args, step)?;
    let built = model.graph(step);
    let graph = &built.graph;
    let costs = roofline::of(graph);

    let engine = match args.floor_only {
        true => None,
        false => Some(engine::start(&args.engine, args.threads.into(), None)?),
    };
    let rates = rates(args, engine.as_deref())?;
    let mut spans = Vec::new();
    let mut seconds = None;
    if let Some(engine) = &engine {
        let measured = measure(&**engine, &built, args)?;
        (seconds, spans) = (Some(measured.0), measured.1);
    }
    let mut figures = Figures {
        vgpu: crate::own_program::VERSION.to_owned(),
        engine: engine
            .as_ref()
            .map_or("none", |engine| engine.name())
            .to_owned(),
        device: { engine.as_ref() }
            .map_or("", |engine| engine.description())
            .to_owned(),
        model: args.model.name(),
        weights: match (&args.weights, model.expert_weights) {
            (Some(weights), _) => weights.clone(),
            (None, Some(ty)) => ty.ggml_name().to_owned(),
            (None, None) => Q4_K_M.to_owned(),
        },
        cache: args.cache.clone(),
        tokens: args.tokens,
        past: args.past,
        nodes: graph.nodes.len(),
        bandwidth: rates.memory,
        operations: rates.operations,
        total: Line {
            name: "all".to_owned(),
            ..Line::default()
        },
        seconds,
        by_op: Vec::new(),
    };
    let parts = parts(graph, &costs, &spans);
    figures.by_op = by_op(&parts, &rates);
    for line in &figures.by_op {
        figures.total.add(line.nodes, &line.cost(), line.seconds);
    }
    figures.total.floor = figures.total.cost().floor(&rates);

    print!("{}", report(&figures));
    if args.timeline {
        print!("{}", timeline(&parts, &rates));
    }
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&figures)? + "\n";
        std::fs::write(path, text).with_context(|| format!("writing {}", path.display()))?;
    }
    match before {
        Some(before) => compare(&figures, &before, args.allow),
        None => Ok(ExitCode::SUCCESS),
    }
}

fn model_of(args: &Args, step: StepShape) -> anyhow::Result<Model> {
    let mut model = args.model.model();
    let ty = |name: &str| {
        Type::from_ggml_name(name)
            .or_else(|| {
                { Type::ALL.iter().copied() }.find(|ty| ty.ggml_name().eq_ignore_ascii_case(name))
            })
            .ok_or_else(|| anyhow!("{name:?} is not a type of ggml, such as q8_0 or f16"))
    };
    if let Some(weights) = args.weights.as_deref() {
        model.mixes = weights == Q4_K_M;
        model.weights = match model.mixes {
            true => Type::Q4K,
            false => ty(weights)?,
        };
        model.expert_weights = None;
    }
    model.cache = ty(&args.cache)?;
    model.context = step.seen;
    for (what, ty, row) in [
        ("weights", model.weights, model.width),
        (
            "weights",
            model.expert_weights.unwrap_or(model.weights),
            model.inner,
        ),
        ("cache", model.cache, model.head),
    ] {
        ensure!(
            ty.row_bytes(row).is_some(),
            "{what} of {}: rows of {row} are not whole blocks of {}",
            ty.ggml_name(),
            ty.block_elements()
        );
    }
    Ok(model)
}

/// The peak rates of the engine: reading memory, and computing products.
fn rates(args: &Args, engine: Option<&dyn Engine>) -> anyhow::Result<Rates> {
    let given = |value: Option<f64>, unit: f64| value.map(|value| value * unit);
    let (memory, operations) = (given(args.bandwidth, 1e9), given(args.tflops, 1e12));
    for value in [memory, operations].into_iter().flatten() {
        ensure!(
            value > 0.0 && value.is_finite(),
            "a rate must be more than 0"
        );
    }
    if let (Some(memory), Some(operations)) = (memory, operations) {
        return Ok(Rates { memory, operations });
    }
    let engine = engine.context("peak rates are measured on an engine")?;
    let mut options = Options::default();
    if engine.name() == "cpu" {
        options.weights = CPU_WEIGHTS;
    }
    let measured = vgpu_check::peaks(engine, &options)?;
    Ok(Rates {
        memory: memory.unwrap_or(measured.memory),
        operations: operations.unwrap_or(measured.operations),
    })
}

/// The median time of a step, and the times of its parts.
fn measure(
    engine: &dyn Engine,
    built: &Built,
    args: &Args,
) -> anyhow::Result<(f64, Vec<NodeTiming>)> {
    let wanted: u64 = built.sizes.iter().sum();
    let free = engine.memory().free;
    ensure!(
        wanted <= free,
        "the model needs {} MiB, and {} has {} MiB free",
        wanted >> 20,
        engine.name(),
        free >> 20
    );
    let loaded = built.load(engine);
    built.write_inputs(&loaded, args.past);
    let mut plan = built.compile(engine, &loaded);
    // The first run warms the caches up. The second is the one in which a GPU captures its graph.
    for _ in 0..2 {
        plan.run()?;
    }
    let times = (0..args.repeats)
        .map(|_| {
            let start = Instant::now();
            plan.run()?;
            Ok(start.elapsed())
        })
        .collect::<anyhow::Result<Vec<Duration>>>()?;
    let mut lines = (0..args.repeats)
        .map(|_| plan.profile())
        .collect::<Result<Vec<Vec<NodeTiming>>, _>>()?;
    let mut spans = lines.pop().unwrap_or_default();
    for (at, span) in spans.iter_mut().enumerate() {
        let others = lines.iter().map(|line| line[at].seconds);
        span.seconds = vgpu_median::median(others.chain([span.seconds]));
    }
    Ok((vgpu_median::median(times).as_secs_f64(), spans))
}

/// A part of the plan: its name, the number of its nodes, their cost, and its time.
struct Part {
    name: String,
    nodes: usize,
    cost: Cost,
    seconds: Option<f64>,
}

/// The parts in execution order. Without timings, one part per node.
fn parts(graph: &Graph, costs: &[Cost], spans: &[NodeTiming]) -> Vec<Part> {
    let part = |nodes: &[usize], seconds| {
        let mut names: Vec<String> = Vec::new();
        for &at in nodes {
            let name = roofline::label(graph, &graph.nodes[at]);
            if !names.contains(&name) {
                names.push(name);
            }
        }
        Part {
            name: names.join(" + "),
            nodes: nodes.len(),
            cost: nodes.iter().map(|&at| costs[at]).sum(),
            seconds,
        }
    };
    if spans.is_empty() {
        return (0..graph.nodes.len()).map(|at| part(&[at], None)).collect();
    }
    let all: Vec<usize> = (0..graph.nodes.len()).collect();
    spans
        .iter()
        .map(|span| match span.nodes.is_empty() {
            true => part(&all, Some(span.seconds)),
            false => part(&span.nodes, Some(span.seconds)),
        })
        .collect()
}

fn by_op(parts: &[Part], rates: &Rates) -> Vec<Line> {
    let mut lines: BTreeMap<&str, Line> = BTreeMap::new();
    for part in parts {
        let line = lines.entry(&part.name).or_insert_with(|| Line {
            name: part.name.clone(),
            ..Line::default()
        });
        line.add(part.nodes, &part.cost, part.seconds);
    }
    let mut lines: Vec<Line> = lines.into_values().collect();
    for line in &mut lines {
        line.floor = line.cost().floor(rates);
    }
    lines.sort_by(|a, b| {
        let time = |line: &Line| line.seconds.unwrap_or(line.floor);
        time(b).total_cmp(&time(a))
    });
    lines
}

fn report(figures: &Figures) -> String {
    let Figures {
        total,
        by_op,
        model,
        weights,
        cache,
        tokens,
        past,
        nodes,
        ..
    } = figures;
    let rates = Rates {
        memory: figures.bandwidth,
        operations: figures.operations,
    };
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = writeln!(
        text,
        "{model} {weights}, cache {cache}, {tokens} token(s) after {past}: {nodes} nodes on {} \
         ({})",
        figures.engine, figures.device
    );
    let _ = writeln!(
        text,
        "at most {:.1} GB/s and {:.2} TFLOPS: at least {} a step for {} from memory and {:.1} \
         GFLOP ({})",
        rates.memory / 1e9,
        rates.operations / 1e12,
        time(total.floor),
        size(total.memory),
        total.operations as f64 / 1e9,
        match total.cost().is_bound_by_memory(&rates) {
            true => "memory",
            false => "operations",
        }
    );
    if let Some(seconds) = figures.seconds {
        let _ = writeln!(
            text,
            "measured: {} a step, {:.0} % of the fastest, {:.1} tokens/s",
            time(seconds),
            100.0 * total.floor / seconds,
            *tokens as f64 / seconds
        );
    }
    let _ = writeln!(
        text,
        "\n{:44} {:>6} {:>10} {:>10} {:>10} {:>10} {:>10} {:>9}",
        "part", "nodes", "memory", "cached", "GFLOP", "at least", "measured", "of least"
    );
    for line in by_op.iter().chain([total]) {
        let (measured, share) = measured(line.floor, line.seconds);
        let _ = writeln!(
            text,
            "{:44} {:>6} {:>10} {:>10} {:>10.3} {:>10} {measured:>10} {share:>9}",
            line.name,
            line.nodes,
            size(line.memory),
            size(line.cached),
            line.operations as f64 / 1e9,
            time(line.floor),
        );
    }
    text
}

fn timeline(parts: &[Part], rates: &Rates) -> String {
    let mut text = format!(
        "\n{:>10} {:>10} {:>10} {:>9}  part\n",
        "begins", "at least", "took", "of least"
    );
    let mut begin = 0.0;
    for part in parts {
        let floor = part.cost.floor(rates);
        let (took, share) = measured(floor, part.seconds);
        let _ = writeln!(
            text,
            "{:>10} {:>10} {took:>10} {share:>9}  {}",
            time(begin),
            time(floor),
            part.name
        );
        begin += part.seconds.unwrap_or(floor);
    }
    text
}

/// The measured time, and the lower bound as a share of it.
fn measured(floor: f64, seconds: Option<f64>) -> (String, String) {
    match seconds {
        Some(seconds) => (
            time(seconds),
            format!("{:.0} %", 100.0 * floor / seconds.max(1e-12)),
        ),
        None => ("-".to_owned(), "-".to_owned()),
    }
}

fn time(seconds: f64) -> String {
    match seconds {
        s if s >= 1.0 => format!("{s:.2} s"),
        s if s >= 1e-3 => format!("{:.2} ms", s * 1e3),
        s => format!("{:.1} us", s * 1e6),
    }
}

fn size(bytes: u64) -> String {
    match bytes as f64 {
        b if b >= 1e9 => format!("{:.2} GB", b / 1e9),
        b if b >= 1e6 => format!("{:.1} MB", b / 1e6),
        b => format!("{:.1} KB", b / 1e3),
    }
}

/// Prints the operators that have become slower. Returns whether the step is slower than allowed.
fn compare(now: &Figures, before: &Figures, allow: f64) -> anyhow::Result<ExitCode> {
    fn same(figures: &Figures) -> impl PartialEq + std::fmt::Debug + '_ {
        let Figures {
            engine,
            model,
            weights,
            cache,
            tokens,
            past,
            ..
        } = figures;
        (engine, model, weights, cache, tokens, past)
    }
    ensure!(
        same(now) == same(before),
        "figures of {:?} are compared with those of {:?}",
        same(now),
        same(before)
    );
    println!(
        "\n{:44} {:>10} {:>10} {:>9}",
        "part", "before", "now", "longer"
    );
    let line = |name: &str, before: Option<f64>, now: Option<f64>| {
        if let (Some(before), Some(now)) = (before, now) {
            let percent = 100.0 * (now / before.max(1e-12) - 1.0);
            println!(
                "{name:44} {:>10} {:>10} {percent:>7.1} %",
                time(before),
                time(now)
            );
        }
    };
    for now in &now.by_op {
        let mut before = before.by_op.iter();
        let before = before.find(|line| line.name == now.name);
        line(&now.name, before.and_then(|line| line.seconds), now.seconds);
    }
    line("a step", before.seconds, now.seconds);
    let (Some(then), Some(seconds)) = (before.seconds, now.seconds) else {
        return Ok(ExitCode::SUCCESS);
    };
    Ok(match seconds <= then * (1.0 + allow / 100.0) {
        true => ExitCode::SUCCESS,
        false => {
            println!("slower by more than {allow} %");
            ExitCode::FAILURE
        }
    })
}
