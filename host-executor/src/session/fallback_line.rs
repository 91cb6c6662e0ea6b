//! What an engine has left to the CPU engine, as a line of the log.
#![forbid(unsafe_code)]

use vgpu_engine::{Engine, FallbackUse};

/// How much of the engine's work the CPU engine has had, for people. `None`: nothing, or the engine
/// does not count that.
pub(super) fn fallback_line(engine: &dyn Engine) -> Option<String> {
    line(engine.name(), &engine.fallback_use()?)
}

fn line(engine: &str, used: &FallbackUse) -> Option<String> {
    if used.other_nodes == 0 {
        return None;
    }
    let nodes = used.device_nodes.saturating_add(used.other_nodes);
    let [device, other] = [used.device_time, used.other_time].map(|time| time.as_secs_f64());
    let seconds = device + other;
    let percent = match seconds > 0.0 {
        true => 100.0 * other / seconds,
        false => 0.0,
    };
    Some(format!(
        "engine {engine}: the CPU engine has computed {} of {nodes} nodes ({percent:.1} % of the \
         time) since the start",
        used.other_nodes
    ))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn line_has_the_nodes_and_the_time_of_the_cpu_engine() {
        let used = FallbackUse {
            device_nodes: 3988,
            other_nodes: 12,
            device_time: Duration::from_millis(969),
            other_time: Duration::from_millis(31),
        };
        let expected = "engine ggml:Vulkan0: the CPU engine has computed 12 of 4000 nodes (3.1 % \
                        of the time) since the start";
        assert_eq!(line("ggml:Vulkan0", &used).as_deref(), Some(expected));
        // The device has had all.
        let none = FallbackUse {
            other_nodes: 0,
            other_time: Duration::ZERO,
            ..used
        };
        assert_eq!(line("ggml:Vulkan0", &none), None);
        assert_eq!(line("ggml:Vulkan0", &FallbackUse::default()), None);
        // Less than the clock shows.
        let short = FallbackUse {
            other_nodes: 1,
            ..FallbackUse::default()
        };
        let text = line("ggml:CPU", &short).unwrap_or_default();
        assert!(text.contains("1 of 1 nodes (0.0 % of the time)"), "{text}");
    }
}
