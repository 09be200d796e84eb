/* The header needs nothing before it, may come twice, and every name it promises exists. Compiled as C99 and as C++17, warnings as errors. */
#include "pagedkv.h"
#include "pagedkv.h"

#ifndef PKV_VERSION_MAJOR
#error "no version macros"
#endif

#ifdef __cplusplus
#include <type_traits>
static_assert(std::is_standard_layout<pkv_mla_prefill_fp8_params>::value && std::is_trivial<pkv_mla_prefill_fp8_params>::value, "plain structs");
#endif

int main(void)
{
    pkv_error error = {sizeof(pkv_error), PKV_OK, 0, "", ""};
    return PKV_ABI_VERSION == 1 && error.struct_size == 512 && PKV_ERR_INTERNAL == 300 ? 0 : 1;
}
