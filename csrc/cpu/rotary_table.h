// Cosines and sines of rotary positions: computed in double, for kPositions positions at a time, and kept from call to call.
#pragma once

#include <map>
#include <mutex>
#include <tuple>

#include "rows.h"

namespace hybridpar {

constexpr int64_t kPositions = 512;
constexpr size_t kMostTables = 256;  // 64 MiB of them at d = 128; then all are forgotten

template <class W>
struct RotaryTable {  // [kPositions, half] each
  std::vector<W> cos, sin;
};

// The table of positions [number * kPositions, (number + 1) * kPositions). Any thread may ask.
// frequencies: of each pair; magnitude: factor of cosines and sines.
template <class W>
std::shared_ptr<const RotaryTable<W>> rotary_table(const std::vector<double>& frequencies, double magnitude,
                                                   int64_t number) {
  static std::mutex mutex;
  static std::map<std::tuple<int64_t, double, std::vector<double>>, std::shared_ptr<const RotaryTable<W>>> tables;
  std::lock_guard<std::mutex> lock(mutex);
  const auto key = std::make_tuple(number, magnitude, frequencies);
  if (auto found = tables.find(key); found != tables.end()) return found->second;
  const int64_t half = static_cast<int64_t>(frequencies.size());
  auto made = std::make_shared<RotaryTable<W>>();
  made->cos.resize(kPositions * half);
  made->sin.resize(kPositions * half);
  for (int64_t i = 0; i < half; ++i) {
    for (int64_t at = 0; at < kPositions; ++at) {
      const double angle = static_cast<double>(number * kPositions + at) * frequencies[i];
      made->cos[at * half + i] = static_cast<W>(magnitude * std::cos(angle));
      made->sin[at * half + i] = static_cast<W>(magnitude * std::sin(angle));
    }
  }
  if (tables.size() >= kMostTables) tables.clear();
  tables[key] = made;
  return made;
}

// Angle per position of each of `half` pairs: those given, or if there are none the powers of the base.
inline std::vector<double> pair_frequencies(double base, const std::vector<double>& given, int64_t half) {
  std::vector<double> frequencies = given;
  for (int64_t i = static_cast<int64_t>(given.size()); i < half; ++i)
    frequencies.push_back(std::pow(base, static_cast<double>(i) / -static_cast<double>(half)));
  return frequencies;
}

}  // namespace hybridpar
