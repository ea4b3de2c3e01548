// What happens to a context, on purpose.

#ifndef STAND_IN
#define KERNEL(name, Arguments) extern "C" __global__ void name(const Arguments arguments)
extern "C" __device__ void __assertfail(const char *, const char *, unsigned, const char *, unsigned long long);
#endif

struct FaultArguments {
    int *address;
    long long count, cycles;
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

KERNEL(fault_assert, FaultArguments)
{
#ifndef STAND_IN
    __assertfail("false", "faults.cu", __LINE__, "fault_assert", 1);
#endif
}

// Does not end by itself.
KERNEL(fault_spin, FaultArguments)
{
    volatile int *word = arguments.address;
    while (*word == 0)
        ;
}
