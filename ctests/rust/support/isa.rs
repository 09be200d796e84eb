//! Contexts held to an instruction set.

use crate::api::Context;
use pagedkv::cpu::isa::{Level, VARIABLE};
use std::sync::Mutex;

/// The variable is read when a context is made; tests of one process run side by side, so nobody else may make one meanwhile.
static ENVIRONMENT: Mutex<()> = Mutex::new(());

pub fn context(level: Level, threads: u32) -> Context {
    let _guard = ENVIRONMENT.lock().unwrap_or_else(|e| e.into_inner());
    // SAFETY: every test of the process sets and reads the variable under the lock.
    unsafe { std::env::set_var(VARIABLE, level.name()) };
    Context::new(threads)
}
