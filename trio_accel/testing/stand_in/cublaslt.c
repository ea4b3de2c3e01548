/* A stand-in cuBLASLt: its handles alone, so that what asks for products learns that there are none.
 * cuBLAS depends on this library, and a loader looks for it before cuBLAS.
 */
#include <stdlib.h>

#define API __attribute__((visibility("default")))

enum { SUCCESS = 0, ALLOC_FAILED = 3 };

API int cublasLtCreate(void **handle)
{
    *handle = malloc(1);
    return *handle ? SUCCESS : ALLOC_FAILED;
}

API int cublasLtDestroy(void *handle)
{
    free(handle);
    return SUCCESS;
}
