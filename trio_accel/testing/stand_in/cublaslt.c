/* Nothing: cuBLAS depends on this library, and a loader looks for it before cuBLAS. */
