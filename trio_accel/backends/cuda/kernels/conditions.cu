// What decides in a graph of the driver whether a part of it runs: each kernel is launched with one thread.

#ifndef STAND_IN
extern "C" __device__ __cudart_builtin__ void CUDARTAPI cudaGraphSetConditional(
    cudaGraphConditionalHandle handle, unsigned int value);
#endif

struct BranchArguments {
    const void *condition;
    int itemsize, is_signed, is_test;
    int number; // of the part that the handle is for
};

struct LoopArguments {
    const void *condition;
    i64 *count;
    i64 limit;
    const volatile int *stop; // of the host: it ends all loops
    int itemsize, is_begin;
};

// Numbers beyond 63 bits become negative ones, which no part has.
static __device__ i64 read_number(const void *place, int itemsize, int is_signed)
{
    switch (itemsize) {
    case 1:
        return is_signed ? *(const signed char *)place : *(const unsigned char *)place;
    case 2:
        return is_signed ? *(const short *)place : *(const unsigned short *)place;
    case 4:
        return is_signed ? (i64) * (const int *)place : (i64) * (const unsigned *)place;
    default:
        return *(const i64 *)place;
    }
}

extern "C" __global__ void set_branch(unsigned long long handle, const BranchArguments arguments)
{
    i64 number = read_number(arguments.condition, arguments.itemsize, arguments.is_signed);
    if (arguments.is_test)
        number = number == 0;
    cudaGraphSetConditional(handle, number == arguments.number);
}

// The host's memory is looked at in every so many turns: that takes longer than all the rest.
enum { STOPS = 16 };

// Before the first turn, and at the end of each.
extern "C" __global__ void set_loop(unsigned long long handle, const LoopArguments arguments)
{
    i64 count = arguments.is_begin ? 0 : *arguments.count + 1;
    *arguments.count = count;
    bool goes_on = read_number(arguments.condition, arguments.itemsize, 0) != 0 && count < arguments.limit;
    if (goes_on && count % STOPS == 0 && *arguments.stop)
        goes_on = false;
    cudaGraphSetConditional(handle, goes_on);
}
