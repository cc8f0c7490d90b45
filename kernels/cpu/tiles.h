// How the rows of a product are divided among register tiles.
#pragma once

#include <algorithm>

#include "simd.h"

namespace shoal {

constexpr i64 ceil_div(i64 a, i64 b) { return (a + b - 1) / b; }

// Rows in tiles of at most `most`, as even as possible: 32 rows are 2 * 6 + 4 * 5. No row is padded, and no tile is
// left with so few sums that they do not hide the latency of a multiply-add.
struct Tiles {
    i64 count, size, larger;  // the first `larger` tiles have one row more than `size`

    Tiles(i64 rows, i64 most) : count(ceil_div(rows, most)), size(rows / count), larger(rows % count) {}
    i64 first_row(i64 tile) const { return tile * size + std::min(tile, larger); }
};

}  // namespace shoal
