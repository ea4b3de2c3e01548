// Sequences whose next state is a linear function of the state: MRG32k3a (L'Ecuyer, Operations Research 47, 1999) and
// XORWOW (Marsaglia, Journal of Statistical Software 8, 2003). And Sobol points.

struct SequenceArguments {
    unsigned *out;
    const unsigned *state, *jumps;
    i64 count, piece;
    int levels, kind;
};

struct SobolArguments {
    unsigned *out;
    const unsigned *directions, *shift;
    i64 count, dimensions;
    u64 first;
    i64 bits;
};

#define M1 4294967087ull
#define M2 4294944443ull

struct Mrg {
    u64 s[6];

    __device__ void begin(const unsigned *state)
    {
        for (int place = 0; place < 6; place++)
            s[place] = state[place];
    }

    // The matrices of both recurrences, 9 words each.
    __device__ void jump(const unsigned *matrix, u64)
    {
        u64 old[6];
        for (int place = 0; place < 6; place++)
            old[place] = s[place];
        for (int row = 0; row < 6; row++) {
            const u64 modulus = row < 3 ? M1 : M2;
            u64 sum = 0;
            for (int column = 0; column < 3; column++)
                sum += matrix[3 * row + column] * old[(row < 3 ? 0 : 3) + column] % modulus;
            s[row] = sum % modulus;
        }
    }

    __device__ unsigned next()
    {
        const u64 one = (1403580 * s[1] + 810728 * (M1 - s[0])) % M1, two = (527612 * s[5] + 1370589 * (M2 - s[3])) % M2;
        s[0] = s[1], s[1] = s[2], s[2] = one;
        s[3] = s[4], s[4] = s[5], s[5] = two;
        return (unsigned)(one >= two ? one - two : one + M1 - two);
    }
};

struct Xorwow {
    unsigned s[6];

    __device__ void begin(const unsigned *state)
    {
        for (int place = 0; place < 6; place++)
            s[place] = state[place];
    }

    // Of each bit of the state, the 5 words that it changes; d counts on.
    __device__ void jump(const unsigned *matrix, u64 words)
    {
        unsigned sum[5] = {};
        for (int bit = 0; bit < 160; bit++) {
            const unsigned mask = 0u - (s[bit / 32] >> bit % 32 & 1);
            for (int place = 0; place < 5; place++)
                sum[place] ^= mask & matrix[5 * bit + place];
        }
        for (int place = 0; place < 5; place++)
            s[place] = sum[place];
        s[5] += (unsigned)(words * 362437);
    }

    __device__ unsigned next()
    {
        const unsigned t = s[0] ^ s[0] >> 2, v = s[4];
        for (int place = 0; place < 4; place++)
            s[place] = s[place + 1];
        s[4] = v ^ v << 4 ^ t ^ t << 1;
        s[5] += 362437;
        return s[4] + s[5];
    }
};

template <typename State> __device__ void draw_piece(const SequenceArguments &arguments, i64 piece, int width)
{
    State state;
    state.begin(arguments.state);
    for (int level = 0; level < arguments.levels; level++)
        if (piece >> level & 1)
            state.jump(arguments.jumps + (i64)level * width, (u64)arguments.piece << level);
    const i64 first = piece * arguments.piece;
    for (i64 place = first; place < first + arguments.piece && place < arguments.count; place++)
        arguments.out[place] = state.next();
}

// One thread for each piece.
KERNEL(draw_sequence, SequenceArguments)
{
    EACH(piece, (arguments.count + arguments.piece - 1) / arguments.piece)
        if (arguments.kind)
            draw_piece<Xorwow>(arguments, piece, 800);
        else
            draw_piece<Mrg>(arguments, piece, 18);
}

// One thread for each number.
KERNEL(sobol_points, SobolArguments)
{
    EACH(place, arguments.count)
    {
        const i64 dimension = place % arguments.dimensions;
        const u64 number = arguments.first + (u64)(place / arguments.dimensions);
        unsigned point = arguments.shift[dimension];
        for (int bit = 0; bit < arguments.bits; bit++)
            if (number >> bit & 1)
                point ^= arguments.directions[bit * arguments.dimensions + dimension];
        arguments.out[place] = point;
    }
}
