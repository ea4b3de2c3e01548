// Ten rounds of Philox of counters, in place: the words of each are the lower halves of four numbers.
typedef unsigned u32;
typedef unsigned long long u64;

struct Arguments {
    u64 *words[4];
    u64 key;
};

extern "C" __attribute__((visibility("default"))) long long run(const char *packed, long long first, long long end)
{
    Arguments arguments;
    __builtin_memcpy(&arguments, packed, sizeof arguments);
    u64 *const a = arguments.words[0], *const b = arguments.words[1], *const c = arguments.words[2],
               *const d = arguments.words[3];
    const u32 key0 = (u32)arguments.key, key1 = (u32)(arguments.key >> 32);
#pragma GCC ivdep
    for (long long i = first; i < end; i++) {
        u64 one = a[i], two = b[i], three = c[i], four = d[i];
#pragma GCC unroll 10
        for (u32 round = 0; round < 10; round++) {
            const u64 upper = (one & 0xffffffff) * 0xD2511F53u, lower = (three & 0xffffffff) * 0xCD9E8D57u;
            one = lower >> 32 ^ two ^ (u32)(key0 + round * 0x9E3779B9u);
            three = upper >> 32 ^ four ^ (u32)(key1 + round * 0xBB67AE85u);
            two = lower & 0xffffffff;
            four = upper & 0xffffffff;
        }
        a[i] = one, b[i] = two, c[i] = three, d[i] = four;
    }
    return 0;
}
