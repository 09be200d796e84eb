//! Threads of a CPU context: an own pool that sleeps when idle, or the engine's `parallel_for`.
//!
//! Each piece of work writes its own outputs, in an order of additions that follows from shapes and positions: results do not depend on how many threads there
//! are or which takes what.

use crate::abi::context::pkv_parallel_for_fn;
use crate::error::{Error, Result};
use crate::panics;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

// Under the model checker (see `model` below) the same code runs on its locks, atomics and threads.
#[cfg(all(test, loom))]
use loom::{
    sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    sync::{Arc, Condvar, Mutex, MutexGuard},
    thread::{Builder, JoinHandle},
};
#[cfg(not(all(test, loom)))]
use std::{
    sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    sync::{Arc, Condvar, Mutex, MutexGuard},
    thread::{Builder, JoinHandle},
};

/// How long a worker that has just finished looks for the next job before it sleeps: decode steps come back to back, and a wake-up through the kernel
/// costs as much as a small matmul. An idle engine sees no load.
const LINGER: Duration = if cfg!(loom) { Duration::ZERO } else { Duration::from_micros(50) };

/// Look for what is about to come, once or for as long as [`LINGER`]; whether it came.
fn linger(came: impl Fn() -> bool) -> bool {
    let start = Instant::now();
    loop {
        if came() {
            return true;
        }
        if start.elapsed() >= LINGER {
            return false;
        }
        std::hint::spin_loop();
    }
}

type EngineFn = unsafe extern "C" fn(*mut c_void, u32, crate::abi::context::pkv_task_fn, *mut c_void);

#[derive(Debug)]
pub enum Threads {
    Own(Pool),
    Engine { run: EngineFn, user: *mut c_void, count: usize },
}

// SAFETY: the header demands a parallel_for that may be called from several threads at once.
unsafe impl Send for Threads {}
// SAFETY: as above.
unsafe impl Sync for Threads {}

impl Threads {
    pub fn engine(run: EngineFn, user: *mut c_void, count: u32) -> Result<Self> {
        const { assert!(size_of::<pkv_parallel_for_fn>() == size_of::<EngineFn>()) };
        Ok(Threads::Engine { run, user, count: Self::checked(count.max(1) as usize)? })
    }

    /// 0: the cores this process may use; the standard library knows affinity masks and cgroup quotas.
    pub fn own(count: u32) -> Result<Self> {
        let cores = || std::thread::available_parallelism().map_or(1, |n| n.get()).min(Self::MOST);
        let count = if count == 0 { cores() } else { Self::checked(count as usize)? };
        Pool::new(count).map(Threads::Own)
    }

    /// A workspace has room for each.
    const MOST: usize = 1024;

    fn checked(count: usize) -> Result<usize> {
        if count > Self::MOST {
            return Err(Error::value("options.num_threads", format!("is {count}, must be at most {}", Self::MOST)));
        }
        Ok(count)
    }

    pub fn count(&self) -> usize {
        match self {
            Threads::Own(pool) => pool.workers.len() + 1,
            Threads::Engine { count, .. } => *count,
        }
    }

    /// Run `task(i)` for each `i < count`, each once, on any threads; returns when all are done.
    pub fn run(&self, count: usize, task: impl Fn(usize) + Sync) -> Result<()> {
        let failure = Failure::default();
        let body = |i: usize| failure.catch(|| task(i));
        match self {
            _ if count <= 1 || self.count() == 1 => (0..count).for_each(body),
            Threads::Own(pool) => pool.run(count, &body),
            Threads::Engine { run, user, .. } => {
                // Indices cross as u32: more tasks than that go in strides.
                let calls = count.min(u32::MAX as usize);
                let strided = |i: usize| (i..count).step_by(calls).for_each(&body);
                let mut erased: &(dyn Fn(usize) + Sync) = &strided;
                // SAFETY: `erased` outlives the call, which returns when all tasks are done (the header's contract).
                unsafe { run(*user, calls as u32, Some(engine_task), (&raw mut erased).cast()) };
            }
        }
        failure.into_result()
    }

    /// Run `task(lane, i)` for each `i < count`, where no two tasks run at the same time with the same `lane < lanes()`: for scratch per thread.
    /// Each lane does its own share first, in order: memory is read on from where it was left, and the next call finds it in the same core's cache. Then it
    /// helps the others.
    pub fn run_with_lane(&self, count: usize, task: impl Fn(usize, usize) + Sync) -> Result<()> {
        let lanes = self.count().min(count);
        let shares: Vec<Share> = (0..lanes).map(|lane| Share(AtomicUsize::new(lane * count / lanes))).collect();
        self.run(lanes, |lane| {
            for share in (lane..lanes).chain(0..lane) {
                let end = (share + 1) * count / lanes;
                loop {
                    let i = shares[share].0.fetch_add(1, Ordering::Relaxed);
                    if i >= end {
                        break;
                    }
                    task(lane, i);
                }
            }
        })
    }
}

/// The next task of a lane's share, on cache lines of its own.
#[repr(align(128))]
struct Share(AtomicUsize);

unsafe extern "C" fn engine_task(task: *mut c_void, index: u32) {
    // SAFETY: `Threads::run` passed a pointer to its closure, which lives until parallel_for returns.
    let body = unsafe { *task.cast::<&(dyn Fn(usize) + Sync)>() };
    body(index as usize);
}

/// The first panic of a parallel region.
#[derive(Default)]
struct Failure {
    text: Mutex<Option<String>>,
}

impl Failure {
    fn catch(&self, body: impl FnOnce()) {
        if let Err(payload) = panics::quiet(|| catch_unwind(AssertUnwindSafe(body))) {
            lock(&self.text).get_or_insert_with(|| format!("panic in a worker: {}", panics::text(&*payload)));
        }
    }

    fn into_result(self) -> Result<()> {
        match lock(&self.text).take() {
            Some(text) => Err(Error::internal(text)),
            None => Ok(()),
        }
    }
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// One parallel region. Indices are claimed one by one; the submitter works too and leaves when all are done.
struct Job {
    body: *const (dyn Fn(usize) + Sync),
    count: usize,
    next: AtomicUsize,
    done: AtomicUsize,
    finished: Mutex<bool>,
    wake: Condvar,
}

// SAFETY: `body` is Sync, and is only called for claimed indices, all of which finish before the submitter's borrow ends.
unsafe impl Send for Job {}
// SAFETY: as above.
unsafe impl Sync for Job {}

impl Job {
    /// Work until no index is left to claim.
    fn work(&self) {
        loop {
            let i = self.next.fetch_add(1, Ordering::Relaxed);
            if i >= self.count {
                return;
            }
            // SAFETY: index `i` is claimed and not done, so the submitter still waits in `Pool::run` and the closure lives.
            unsafe { (*self.body)(i) };
            if self.done.fetch_add(1, Ordering::AcqRel) + 1 == self.count {
                *lock(&self.finished) = true;
                self.wake.notify_all();
            }
        }
    }

    fn exhausted(&self) -> bool {
        self.next.load(Ordering::Relaxed) >= self.count
    }

    fn wait(&self) {
        if linger(|| self.done.load(Ordering::Acquire) == self.count) {
            return;
        }
        let mut finished = lock(&self.finished);
        while !*finished {
            finished = self.wake.wait(finished).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
    }
}

#[derive(Default)]
struct Shared {
    jobs: Mutex<Vec<Arc<Job>>>,
    wake: Condvar,
    /// Counts submissions, so that a lingering worker sees a new one without the lock.
    generation: AtomicU64,
    sleeping: AtomicUsize,
    stop: AtomicBool,
}

pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pool({} workers)", self.workers.len())
    }
}

impl Pool {
    fn new(threads: usize) -> Result<Self> {
        let mut pool = Pool { shared: Arc::default(), workers: Vec::new() };
        for i in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let worker = Builder::new().name(format!("pagedkv-{i}")).spawn(move || shared.serve());
            pool.workers.push(worker.map_err(|e| {
                Error::new(
                    crate::error::Status::NoMemory,
                    "options.num_threads",
                    format!("could not start thread {i}: {e}"),
                )
            })?);
        }
        Ok(pool)
    }

    fn run(&self, count: usize, body: &(dyn Fn(usize) + Sync)) {
        // SAFETY: only the lifetime is erased; `wait` below keeps the borrow alive past the last use.
        let body = unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static (dyn Fn(usize) + Sync)>(body) };
        let job = Arc::new(Job {
            body,
            count,
            next: AtomicUsize::new(0),
            done: AtomicUsize::new(0),
            finished: Mutex::new(false),
            wake: Condvar::new(),
        });
        {
            let mut jobs = lock(&self.shared.jobs);
            jobs.push(Arc::clone(&job));
            self.shared.generation.fetch_add(1, Ordering::Release);
            for _ in 0..self.shared.sleeping.load(Ordering::Relaxed).min(count - 1) {
                self.shared.wake.notify_one();
            }
        }
        job.work();
        lock(&self.shared.jobs).retain(|j| !Arc::ptr_eq(j, &job));
        job.wait();
    }
}

impl Shared {
    fn serve(&self) {
        let mut seen = 0;
        loop {
            linger(|| self.generation.load(Ordering::Acquire) != seen);
            let job = {
                let mut jobs = lock(&self.jobs);
                loop {
                    if self.stop.load(Ordering::Relaxed) {
                        return;
                    }
                    seen = self.generation.load(Ordering::Relaxed);
                    if let Some(job) = jobs.iter().find(|j| !j.exhausted()) {
                        break Arc::clone(job);
                    }
                    self.sleeping.fetch_add(1, Ordering::Relaxed);
                    jobs = self.wake.wait(jobs).unwrap_or_else(|poisoned| poisoned.into_inner());
                    self.sleeping.fetch_sub(1, Ordering::Relaxed);
                }
            };
            job.work();
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        {
            let _jobs = lock(&self.shared.jobs);
            self.shared.stop.store(true, Ordering::Relaxed);
            self.shared.generation.fetch_add(1, Ordering::Release);
        }
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            let _ = worker.join();
        }
    }
}

/// Every interleaving of the pool's threads that a few preemptions can make: `RUSTFLAGS="--cfg loom" cargo test --lib parallel::model`. The checker fails on a
/// sleeper that nobody wakes, and on a cell that two threads touch without one having waited for the other.
#[cfg(all(test, loom))]
mod model {
    use super::*;
    use loom::cell::UnsafeCell;

    fn check(preemptions: usize, body: impl Fn() + Sync + Send + 'static) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(preemptions);
        model.check(body);
    }

    /// Plain memory that loom watches.
    struct Cell(UnsafeCell<u32>);
    // SAFETY: loom fails the test where two accesses meet.
    unsafe impl Sync for Cell {}

    impl Cell {
        fn add(&self) {
            // SAFETY: as above.
            self.0.with_mut(|cell| unsafe { *cell += 1 });
        }

        fn get(&self) -> u32 {
            // SAFETY: as above.
            self.0.with(|cell| unsafe { *cell })
        }
    }

    /// Each index writes its cell without a lock; afterwards the submitter reads them all.
    fn region(threads: &Threads, count: usize) {
        let cells: Vec<_> = (0..count).map(|_| Cell(UnsafeCell::new(0))).collect();
        threads.run(count, |i| cells[i].add()).unwrap();
        assert!(cells.iter().all(|cell| cell.get() == 1));
    }

    #[test]
    fn regions_follow_each_other_and_the_pool_ends() {
        check(2, || {
            let threads = Threads::own(2).unwrap();
            region(&threads, 2);
            region(&threads, 3);
        });
    }

    #[test]
    fn two_workers() {
        check(2, || region(&Threads::own(3).unwrap(), 3));
    }

    #[test]
    fn two_submitters_share_a_worker() {
        check(2, || {
            let threads = Arc::new(Threads::own(2).unwrap());
            let other = Arc::clone(&threads);
            let submitter = loom::thread::spawn(move || region(&other, 2));
            region(&threads, 2);
            submitter.join().unwrap();
        });
    }

    #[test]
    fn a_panic_is_an_error() {
        check(2, || {
            let threads = Threads::own(2).unwrap();
            assert!(threads.run(2, |i| assert!(i != 1, "one")).is_err());
            region(&threads, 2);
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn counts(threads: &Threads) {
        for count in [0usize, 1, 2, 3, 100, 10_000] {
            let hits: Vec<_> = (0..count).map(|_| AtomicUsize::new(0)).collect();
            threads.run(count, |i| _ = hits[i].fetch_add(1, Ordering::Relaxed)).unwrap();
            assert!(hits.iter().all(|h| h.load(Ordering::Relaxed) == 1));
        }
    }

    #[test]
    fn each_index_runs_once() {
        for n in [1, 2, 5] {
            counts(&Threads::own(n).unwrap());
        }
    }

    #[test]
    fn many_submitters_share_a_pool() {
        let threads = Threads::own(3).unwrap();
        std::thread::scope(|s| (0..8).for_each(|_| _ = s.spawn(|| (0..50).for_each(|_| counts(&threads)))));
    }

    #[test]
    fn a_lane_is_never_shared_and_each_task_runs_once() {
        let threads = Threads::own(4).unwrap();
        for count in [0, 1, 3, 4, 5, 1000] {
            let busy: Vec<_> = (0..4).map(|_| AtomicBool::new(false)).collect();
            let hits: Vec<_> = (0..count).map(|_| AtomicUsize::new(0)).collect();
            threads
                .run_with_lane(count, |lane, i| {
                    assert!(!busy[lane].swap(true, Ordering::SeqCst));
                    hits[i].fetch_add(1, Ordering::Relaxed);
                    busy[lane].store(false, Ordering::SeqCst);
                })
                .unwrap();
            assert!(hits.iter().all(|h| h.load(Ordering::Relaxed) == 1));
        }
    }

    #[test]
    fn a_panic_is_an_error_and_the_pool_lives_on() {
        let threads = Threads::own(2).unwrap();
        let e = threads.run(10, |i| assert!(i != 7, "seven")).unwrap_err();
        assert_eq!(e.status, crate::error::Status::Internal);
        assert!(e.message.contains("seven"), "{}", e.message);
        counts(&threads);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn an_idle_pool_uses_no_cpu() {
        let threads = Threads::own(4).unwrap();
        counts(&threads);
        std::thread::sleep(Duration::from_millis(20));
        use std::os::unix::thread::JoinHandleExt;
        let Threads::Own(pool) = &threads else { unreachable!() };
        // The workers' own clocks: other tests run beside this one.
        let cpu = || -> Duration {
            let of = |worker: &JoinHandle<()>| {
                let (mut clock, mut time) = (0, libc::timespec { tv_sec: 0, tv_nsec: 0 });
                // SAFETY: the thread lives as long as the pool; both results are plain values.
                let failed = unsafe {
                    libc::pthread_getcpuclockid(worker.as_pthread_t(), &mut clock) != 0
                        || libc::clock_gettime(clock, &mut time) != 0
                };
                assert!(!failed);
                Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
            };
            pool.workers.iter().map(of).sum()
        };
        let before = cpu();
        std::thread::sleep(Duration::from_millis(100));
        let burnt = cpu() - before;
        assert!(burnt < Duration::from_millis(5), "an idle pool burnt {burnt:?} of 100 ms");
    }
}
