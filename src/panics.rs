//! Panics stay inside: caught at the boundary, their text kept off the process's stderr and handed to the log instead.

use std::any::Any;
use std::cell::Cell;
use std::panic::{set_hook, take_hook};
use std::sync::Once;

thread_local! {
    /// Whether this thread is inside one of our guards. Not state of the API: it only tells the process-wide panic hook whose panic it sees.
    static GUARDED: Cell<u32> = const { Cell::new(0) };
}

/// Run `body` with Rust's default panic message suppressed on this thread. The hook is chained, so other users of Rust's standard library in the
/// process (a Rust engine linking the rlib) keep theirs for their own panics.
pub fn quiet<R>(body: impl FnOnce() -> R) -> R {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let previous = take_hook();
        set_hook(Box::new(move |info| {
            if GUARDED.try_with(Cell::get).unwrap_or(0) == 0 {
                previous(info);
            }
        }));
    });
    struct Leave;
    impl Drop for Leave {
        fn drop(&mut self) {
            GUARDED.with(|g| g.set(g.get() - 1));
        }
    }
    GUARDED.with(|g| g.set(g.get() + 1));
    let _leave = Leave;
    body()
}

pub fn text(payload: &(dyn Any + Send)) -> &str {
    payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("(no text)")
}
