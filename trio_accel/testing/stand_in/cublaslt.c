/* Nothing: cuBLAS depends on this library, and whoever looks for the one looks for the other first. */
