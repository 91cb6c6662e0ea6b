//! An executor that answers each request as a test says.

use std::time::Duration;

use vgpu_executor::StopFlag;
use vgpu_transport::link::HostEnd;
use vgpu_transport::wire::{ProtocolVersion, Reply, Request};

/// How often a thread looks at its flag.
pub(crate) const POLL_PERIOD: Duration = Duration::from_millis(10);

/// Serves one guest with messages of `version`, until it disconnects, `stop` is set, or the answer
/// is [`Reply::Ended`]. `answer` gets the number of each request; `None`: the request has no reply.
pub(crate) fn serve(
    host: &mut dyn HostEnd,
    version: ProtocolVersion,
    stop: &StopFlag,
    mut answer: impl FnMut(u64, Request) -> Option<Reply>,
) {
    let mut message = Vec::new();
    while !stop.is_set() {
        message.clear();
        let request = match host.receive(&mut message, POLL_PERIOD) {
            Ok(Some(incoming)) => incoming.request,
            Ok(None) => continue,
            Err(_) => return,
        };
        let asked = Request::decode(version, &message).expect("a request");
        let Some(reply) = answer(request, asked) else {
            host.retire();
            continue;
        };
        message.clear();
        reply.encode(version, &mut message);
        let sent = host.send(&message, 0, &mut |_| {});
        host.retire();
        if sent.is_err() || matches!(reply, Reply::Ended { .. }) {
            return;
        }
    }
}
