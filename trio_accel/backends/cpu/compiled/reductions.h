// As NumPy has sums: eight lanes over at most 128 elements, then halves. A compiler would unfold the recursion.
template <class Stage, class At> FUNCTION typename Stage::Partial lanes(i64 first, i64 n, At at)
{
    typename Stage::Partial lane[8];
    for (int j = 0; j < 8; j++)
        lane[j] = at(first + j);
    i64 k = 8;
    for (; k + 8 <= n; k += 8) {
#pragma omp simd
        for (int j = 0; j < 8; j++)
            lane[j] = Stage::combine(lane[j], at(first + k + j));
    }
    typename Stage::Partial all = Stage::combine(
        Stage::combine(Stage::combine(lane[0], lane[1]), Stage::combine(lane[2], lane[3])),
        Stage::combine(Stage::combine(lane[4], lane[5]), Stage::combine(lane[6], lane[7])));
    for (; k < n; k++)
        all = Stage::combine(all, at(first + k));
    return all;
}
template <class Stage, class At> FUNCTION typename Stage::Partial ahead(i64 first, i64 n, At at)
{
    typename Stage::Partial all = at(first);
    for (i64 k = 1; k < n; k++)
        all = Stage::combine(all, at(first + k));
    return all;
}
template <class Stage, class At>
static __attribute__((noinline)) typename Stage::Partial halves(i64 first, i64 n, const At &at)
{
    if (n < 8)
        return ahead<Stage>(first, n, at);
    if (n <= 128)
        return lanes<Stage>(first, n, at);
    const i64 half = n / 2 - n / 2 % 8;
    // A compiler may make arguments from the last to the first: backwards through memory.
    const typename Stage::Partial one = halves<Stage>(first, half, at);
    return Stage::combine(one, halves<Stage>(first + half, n - half, at));
}
