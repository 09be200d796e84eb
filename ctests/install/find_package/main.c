#include <pagedkv.h>
#include <stdio.h>

int main(void)
{
    pkv_context *ctx = NULL;
    if (pkv_context_create(NULL, &ctx, NULL) != PKV_OK)
        return 1;
    printf("pagedkv %s, %u threads\n", pkv_version(), (unsigned)pkv_context_num_threads(ctx));
    pkv_context_destroy(ctx);
    return 0;
}
