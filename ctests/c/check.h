/* What every C test uses: checks that count and print, and a pkv_error at hand. */
#ifndef PAGEDKV_CHECK_H
#define PAGEDKV_CHECK_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pagedkv.h"

static unsigned checks_done, checks_failed;
static pkv_error check_err; /* the error of the call in the last OK() or REFUSED() */

#define CHECK(condition) check_that((condition) != 0, #condition, __FILE__, __LINE__)
/* The call, which must pass &check_err, succeeds. */
#define OK(call) check_status((check_reset(), (call)), PKV_OK, "", #call, __FILE__, __LINE__)
/* The call is refused with this status, and the error names this argument (a substring; "" takes any non-empty name). */
#define REFUSED(call, status, argument) check_status((check_reset(), (call)), status, argument, #call, __FILE__, __LINE__)

static inline int check_that(int ok, const char *what, const char *file, int line)
{
    ++checks_done;
    if (!ok) {
        ++checks_failed;
        printf("%s:%d: failed: %s\n", file, line, what);
    }
    return ok;
}

static inline void check_reset(void)
{
    memset(&check_err, 0x5a, sizeof check_err);
    check_err.struct_size = sizeof check_err;
}

static inline int check_status(pkv_status got, pkv_status want, const char *argument, const char *what, const char *file, int line)
{
    int ended = memchr(check_err.argument, 0, sizeof check_err.argument) && memchr(check_err.message, 0, sizeof check_err.message);
    int ok = got == want && ended && check_err.struct_size == sizeof check_err && check_err.status == got;
    if (want == PKV_OK)
        ok = ok && check_err.native_code == 0 && !check_err.argument[0] && !check_err.message[0];
    else
        ok = ok && check_err.message[0] && check_err.argument[0] && strstr(check_err.argument, argument);
    ++checks_done;
    if (!ok) {
        ++checks_failed;
        printf("%s:%d: %s\n    wanted %s", file, line, what, pkv_status_name(want));
        if (want != PKV_OK)
            printf(" about \"%s\"", argument);
        printf(", got %s, error %s", pkv_status_name(got), pkv_status_name(check_err.status));
        if (ended)
            printf(" about \"%s\": %s", check_err.argument, check_err.message);
        printf("\n");
    }
    return ok;
}

/* The last line of main. A test that checked nothing has failed. */
static inline int check_end(void)
{
    printf("%u checks, %u failed\n", checks_done, checks_failed);
    return checks_failed || !checks_done;
}

static const pkv_stream no_stream = {0};
static const pkv_buffer no_workspace = {0};

#endif
