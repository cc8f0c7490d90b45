// Products of many groups of rows, each with a matrix of its own, shared out as one.
#pragma once

#include <algorithm>
#include <vector>

#include "parallel.h"
#include "tiles.h"

namespace shoal {

// Tiles of at most `most` rows in all groups: rows starts[g] : starts[g + 1] are group g's.
inline i64 grouped_tiles(const std::int32_t* starts, i64 groups, i64 most) {
    i64 tiles = 0;
    for (i64 g = 0; g < groups; g++) tiles += ceil_div(starts[g + 1] - starts[g], most);
    return tiles;
}

// group(g) is a product with `units()` pieces of work, of which compute(begin, end) does some. The pieces of a group of
// few rows take far less time than those of a large one, so they are given out one by one.
template <class Group>
void share_out_groups(i64 groups, int threads, const Group& group) {
    static thread_local std::vector<i64> kept;
    std::vector<i64>& stops = kept;  // by name, `kept` would be another in each helper
    stops.clear();
    i64 units = 0;
    for (i64 g = 0; g < groups; g++) stops.push_back(units += group(g).units());
    parallel_for(units, threads, [&](i64 unit) {
        i64 g = std::upper_bound(stops.begin(), stops.end(), unit) - stops.begin();
        auto product = group(g);
        i64 at = unit - (stops[g] - product.units());
        product.compute(at, at + 1);
    });
}

}  // namespace shoal
