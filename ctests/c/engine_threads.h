/* An engine's own threads behind pkv_parallel_for_fn, and what it saw of the library. Include first: needs POSIX. */
#ifndef PAGEDKV_ENGINE_THREADS_H
#define PAGEDKV_ENGINE_THREADS_H

#include "check.h"

#include <pthread.h>

/* ThreadSanitizer does not see the locks inside Rust's precompiled standard library, on which the library's own pool stands, and would report it.
 * Under it all threads are ours, and every kernel still runs on many. */
#ifdef __SANITIZE_THREAD__
enum { OWN_POOLS = 0 };
#else
enum { OWN_POOLS = 1 };
#endif

enum { MAX_THREADS = 4 };

/* What a callback saw, and whether the library kept its side of the contract. */
struct engine {
    int threads, backwards;
    pthread_mutex_t lock;
    pthread_key_t in_task;
    unsigned calls, tasks, nested;
};

struct job {
    struct engine *engine;
    pkv_task_fn run;
    void *task;
    uint32_t first, step, count;
};

static inline void *engine_work(void *arg)
{
    const struct job *job = (const struct job *)arg;
    pthread_setspecific(job->engine->in_task, job);
    for (uint32_t i = job->first; i < job->count; i += job->step)
        job->run(job->task, job->engine->backwards ? job->count - 1 - i : i);
    pthread_setspecific(job->engine->in_task, NULL);
    return NULL;
}

static inline void engine_parallel_for(void *user, uint32_t count, pkv_task_fn run, void *task)
{
    struct engine *engine = (struct engine *)user;
    pthread_mutex_lock(&engine->lock);
    engine->calls++;
    engine->tasks += count;
    engine->nested += pthread_getspecific(engine->in_task) != NULL;
    pthread_mutex_unlock(&engine->lock);
    struct job jobs[MAX_THREADS];
    pthread_t threads[MAX_THREADS];
    for (int t = 0; t < engine->threads; ++t) {
        struct job job = {engine, run, task, (uint32_t)t, (uint32_t)engine->threads, count};
        jobs[t] = job;
        if (t && pthread_create(&threads[t], NULL, engine_work, &jobs[t]))
            exit(2);
    }
    engine_work(&jobs[0]);
    for (int t = 1; t < engine->threads; ++t)
        pthread_join(threads[t], NULL);
}

static inline void engine_open(struct engine *engine, int threads, int backwards)
{
    memset(engine, 0, sizeof *engine);
    engine->threads = threads;
    engine->backwards = backwards;
    pthread_mutex_init(&engine->lock, NULL);
    pthread_key_create(&engine->in_task, NULL);
}

static inline void engine_close(struct engine *engine)
{
    CHECK(engine->nested == 0); /* the library never calls from inside a task */
    pthread_mutex_destroy(&engine->lock);
    pthread_key_delete(engine->in_task);
}

#endif
