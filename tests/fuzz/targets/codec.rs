//! Messages in both directions, in each version. Each decoded message encodes to the same bytes;
//! other bytes are refused.

use vgpu_transport::wire::{ProtocolVersion, Reply, Request};

pub(crate) fn run(data: &[u8]) {
    for version in ProtocolVersion::ALL {
        run_in(version, data);
    }
}

fn run_in(version: ProtocolVersion, data: &[u8]) {
    let mut again = Vec::new();
    if let Ok(request) = Request::decode(version, data) {
        request.encode(version, &mut again);
        assert_eq!(again, data, "{request:?}");
        for cut in 0..data.len() {
            assert!(
                Request::decode(version, &data[..cut]).is_err(),
                "{cut} bytes of {request:?}"
            );
        }
    }
    if let Ok(reply) = Reply::decode(version, data) {
        again.clear();
        reply.encode(version, &mut again);
        // Capabilities are decoded in any order and encoded in a fixed one.
        assert_eq!(Reply::decode(version, &again).as_ref(), Ok(&reply));
    }
}
