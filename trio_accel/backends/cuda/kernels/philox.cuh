// Philox-4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3; SC 2011), and its words as numbers.

struct Words {
    unsigned word[4];
};

// Of the counter whose first half is a row, and whose second half a column below 65536 and a block.
__device__ Words philox(u64 seed, u64 row, unsigned column, unsigned block)
{
    unsigned key0 = (unsigned)seed, key1 = (unsigned)(seed >> 32);
    unsigned first = (unsigned)row, second = (unsigned)(row >> 32), third = column, fourth = block;
    for (int round = 0; round < 10; round++) {
        const u64 upper = (u64)0xD2511F53u * first, lower = (u64)0xCD9E8D57u * third;
        first = (unsigned)(lower >> 32) ^ second ^ key0;
        second = (unsigned)lower;
        third = (unsigned)(upper >> 32) ^ fourth ^ key1;
        fourth = (unsigned)upper;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return {{first, second, third, fourth}};
}

// A number above 0 up to 1.
__device__ double unit_double(unsigned low, unsigned high)
{
    return (double)((u64)low ^ (u64)high << 21) * 1.1102230246251565e-16 + 5.551115123125783e-17;
}
