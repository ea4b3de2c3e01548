// What happens to a context, on purpose.

#ifndef STAND_IN
#define KERNEL(name, Arguments) extern "C" __global__ void name(const Arguments arguments)
typedef decltype(sizeof 0) Size;
extern "C" __device__ void __assertfail(const char *, const char *, unsigned, const char *, Size);
#define PAUSE() __nanosleep(1000)
#else
// A thread of the host's, which others need as well.
extern "C" int usleep(unsigned);
#define PAUSE() usleep(20)
#endif

struct FaultArguments {
    unsigned *address;
    const volatile unsigned *word;
    long long count;
    unsigned long long sequence;
};

KERNEL(fault_illegal_address, FaultArguments)
{
    *arguments.address = 1;
}

KERNEL(fault_trap, FaultArguments)
{
#ifndef STAND_IN
    asm volatile("trap;");
#endif
}

// Without an address nothing happens.
KERNEL(fault_assert, FaultArguments)
{
#ifndef STAND_IN
    // One thread is enough: each prints a line.
    if (arguments.address && threadIdx.x == 0)
        __assertfail("false", "faults.cu", __LINE__, "fault_assert", 1);
#else
    assert(!arguments.address);
#endif
}

// Does not end by itself, but when the host writes the number to the word; writes to memory until then.
KERNEL(fault_endless, FaultArguments)
{
    for (unsigned pass = 1; (int)(*arguments.word - (unsigned)arguments.sequence) < 0; pass++) {
        for (long long index = threadIdx.x; index < arguments.count; index += blockDim.x)
            arguments.address[index] = pass * 2654435761u + (unsigned)index;
        __threadfence();
        PAUSE();
    }
}
