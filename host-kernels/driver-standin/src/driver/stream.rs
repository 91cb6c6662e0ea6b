//! Streams and events.

use std::ffi::c_uint;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use cudarc::driver::sys;

use super::entry::{HANDLE, INVALID, check_stream, enqueue, entries};
use crate::argument::Out;
use crate::codes::{Answer, Code};
use crate::context::{Context, Event, Stream, new_handle};
use crate::graph::{Capture, Graph};
use crate::lock::lock;
use crate::memory::memory;

entries! {
    // Streams and events.
    cuStreamCreate(stream: Out<u64>, flags: c_uint) {
        let context = Context::current()?;
        if flags > sys::CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint {
            return Err(INVALID);
        }
        let handle = new_handle();
        stream.put(handle)?;
        context.objects().streams.insert(handle, Stream::default());
        Ok(())
    }
    cuStreamDestroy_v2(stream: u64) {
        let context = Context::current()?;
        let removed = context.objects().streams.remove(&stream);
        removed.map(|_| ()).ok_or(HANDLE)
    }
    cuStreamSynchronize(stream: u64) {
        let context = Context::current()?;
        check_stream(&context, stream)?;
        context.queue.drain()
    }
    cuStreamQuery(stream: u64) {
        let context = Context::current()?;
        check_stream(&context, stream)?;
        match context.queue.is_done(context.queue.last()) {
            true => context.queue.alive(),
            false => Err(Code::CUDA_ERROR_NOT_READY),
        }
    }
    cuStreamWriteValue32_v2(stream: u64, address: u64, value: c_uint, flags: c_uint) {
        let context = Context::current()?;
        if flags > 1 || !address.is_multiple_of(4) {
            return Err(INVALID);
        }
        memory().check(context.id, address, 4)?;
        enqueue(&context, stream, move || {
            // SAFETY: the word is memory of the context, aligned, and alive until the queue has
            // come here.
            let word = unsafe { AtomicU32::from_ptr(address as *mut u32) };
            word.store(value, Ordering::Release);
            Ok(())
        })?;
        Ok(())
    }
    cuStreamBeginCapture_v2(stream: u64, mode: c_uint) {
        let context = Context::current()?;
        let mut objects = context.objects();
        let objects = &mut *objects;
        let stream = objects.streams.get_mut(&stream).ok_or(Code::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)?;
        if stream.capture.is_some() || mode > 2 {
            return Err(INVALID);
        }
        let graph = new_handle();
        objects.graphs.insert(graph, Graph::default());
        let is_relaxed = mode == sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as c_uint;
        stream.capture = Some(Capture {
            graph,
            last: None,
            thread: (!is_relaxed).then(|| std::thread::current().id()),
            is_invalid: false,
        });
        Ok(())
    }
    cuStreamEndCapture(stream: u64, graph: Out<u64>) {
        let context = Context::current()?;
        let mut objects = context.objects();
        let stream = objects.streams.get_mut(&stream).ok_or(HANDLE)?;
        let capture = stream.capture.as_ref().ok_or(INVALID)?;
        if capture.thread.is_some_and(|thread| thread != std::thread::current().id()) {
            return Err(Code::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
        }
        let capture = stream.capture.take().ok_or(INVALID)?;
        if capture.is_invalid {
            graph.put(0)?;
            objects.graphs.remove(&capture.graph);
            return Err(Code::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        }
        graph.put(capture.graph)
    }
    cuStreamIsCapturing(stream: u64, status: Out<c_uint>) {
        let context = Context::current()?;
        let mut objects = context.objects();
        let stream = objects.streams.get_mut(&stream).ok_or(HANDLE)?;
        status.put(match &stream.capture {
            None => 0,
            Some(capture) if capture.is_invalid => 2,
            Some(_) => 1,
        })
    }
    cuEventCreate(event: Out<u64>, flags: c_uint) {
        let context = Context::current()?;
        let untimed = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint;
        if flags & !(untimed | sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC as c_uint) != 0 {
            return Err(INVALID);
        }
        let handle = new_handle();
        event.put(handle)?;
        let new = Event {
            has_time: flags & untimed == 0,
            work: None,
            reached: Arc::default(),
        };
        context.objects().events.insert(handle, new);
        Ok(())
    }
    cuEventDestroy_v2(event: u64) {
        let context = Context::current()?;
        let removed = context.objects().events.remove(&event);
        removed.map(|_| ()).ok_or(HANDLE)
    }
    cuEventRecord(event: u64, stream: u64) {
        let context = Context::current()?;
        let reached = Arc::<Mutex<Option<Instant>>>::default();
        if !context.objects().events.contains_key(&event) {
            return Err(HANDLE);
        }
        let of_work = Arc::clone(&reached);
        let work = enqueue(&context, stream, move || {
            *lock(&of_work) = Some(Instant::now());
            Ok(())
        })?;
        let mut objects = context.objects();
        let event = objects.events.get_mut(&event).ok_or(HANDLE)?;
        (event.work, event.reached) = (Some(work), reached);
        Ok(())
    }
    cuEventQuery(event: u64) {
        let context = Context::current()?;
        let work = context.objects().events.get(&event).ok_or(HANDLE)?.work;
        match work.is_none_or(|work| context.queue.is_done(work)) {
            true => context.queue.alive(),
            false => Err(Code::CUDA_ERROR_NOT_READY),
        }
    }
    cuEventSynchronize(event: u64) {
        let context = Context::current()?;
        let work = context.objects().events.get(&event).ok_or(HANDLE)?.work;
        work.map_or(Ok(()), |work| context.queue.wait(work))
    }
    cuEventElapsedTime(milliseconds: Out<f32>, start: u64, end: u64) {
        let context = Context::current()?;
        let objects = context.objects();
        let time = |event: u64| -> Answer<Instant> {
            let event = objects.events.get(&event).ok_or(HANDLE)?;
            if !event.has_time || event.work.is_none() {
                return Err(HANDLE);
            }
            let reached = *lock(&event.reached);
            reached.ok_or(Code::CUDA_ERROR_NOT_READY)
        };
        let (start, end) = (time(start)?, time(end)?);
        milliseconds.put(end.saturating_duration_since(start).as_secs_f32() * 1e3)
    }
}
