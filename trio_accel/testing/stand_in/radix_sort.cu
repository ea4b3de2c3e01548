// The radix sort of `compute.py`: stable, by one thread, which takes eight bits at a time.

typedef unsigned long long u64;

// The bits that are compared: zeros are equal, and what comes first has the smaller number.
template <typename Bits> static Bits key_of(Bits bits, char kind, u64 descends) {
    const Bits sign = (Bits)((Bits)1 << (8 * sizeof(Bits) - 1));
    if (kind == 'f')
        bits = bits == sign || !bits ? sign : (Bits)(bits & sign ? ~bits : bits ^ sign);
    else if (kind == 'i')
        bits ^= sign;
    return descends ? (Bits)~bits : bits;
}

template <typename Bits, typename Value>
static void sort(Bits *keys, Bits *others, Value *values, Value *beside, u64 count, char kind, u64 descends,
                 u64 begin, u64 end) {
    for (u64 bit = begin; bit < end; bit += 8) {
        const u64 mask = end - bit < 8 ? (1u << (end - bit)) - 1 : 255;
        u64 places[257] = {0};
        for (u64 i = 0; i < count; i++)
            places[1 + (key_of(keys[i], kind, descends) >> bit & mask)]++;
        for (int digit = 0; digit < 256; digit++)
            places[digit + 1] += places[digit];
        for (u64 i = 0; i < count; i++) {
            const u64 place = places[key_of(keys[i], kind, descends) >> bit & mask]++;
            others[place] = keys[i];
            if (values)
                beside[place] = values[i];
        }
        Bits *const sorted = others;
        others = keys, keys = sorted;
        Value *const moved = beside;
        beside = values, values = moved;
    }
}

#define OF_VALUES(Bits, Value)                                                                               \
    sort((Bits *)keys, (Bits *)others, (Value *)values, (Value *)beside, count, (char)kind, descends, begin, end)
#define OF_KEYS(Bits)                  \
    if (value_size == 8)               \
        OF_VALUES(Bits, u64);          \
    else                               \
        OF_VALUES(Bits, unsigned);

extern "C" __global__ void radix_sort(u64 keys, u64 others, u64 values, u64 beside, u64 count, u64 begin, u64 end,
                                      u64 kind, u64 key_size, u64 value_size, u64 descends) {
    if (key_size == 8) {
        OF_KEYS(u64)
    } else if (key_size == 4) {
        OF_KEYS(unsigned)
    } else if (key_size == 2) {
        OF_KEYS(unsigned short)
    } else {
        OF_KEYS(unsigned char)
    }
}
