// Events as JSON, byte for byte as Python writes them.
#pragma once

#include "trace.h"

#include <charconv>

namespace hybridpar {

inline void append_number(std::string& text, int64_t number) {
  char digits[24];
  text.append(digits, std::to_chars(digits, digits + sizeof digits, number).ptr);
}

// Nanoseconds as seconds, as Python writes the nearest double: the shortest digits, below 0.0001 with an exponent.
inline void append_seconds(std::string& text, int64_t nanoseconds) {
  if (nanoseconds < 0) {
    text += '-';
    nanoseconds = -nanoseconds;
  }
  char digits[24];
  auto* end = std::to_chars(digits, digits + sizeof digits, nanoseconds).ptr;
  const bool is_small = nanoseconds != 0 && nanoseconds < 100000;
  if (is_small) {
    const auto exponent = 9 - (end - digits - 1);
    while (end[-1] == '0') --end;
    text += digits[0];
    if (end - digits > 1) text.append(".").append(digits + 1, end);
    text.append("e-0").append(1, static_cast<char>('0' + exponent));
    return;
  }
  append_number(text, nanoseconds / 1000000000);
  const auto rest = std::to_string(1000000000 + nanoseconds % 1000000000);
  const auto last = rest.find_last_not_of('0');
  text.append(".").append(rest, 1, last == 0 ? 1 : last);
}

inline void append_event(std::string& text, const Event& event) {
  static constexpr const char* kWhats[] = {"[\"malloc\",", "[\"free\",", "[\"read\",", "[\"write\","};
  if (text.size() > 1) text += ',';
  text += kWhats[static_cast<int>(event.what)];
  append_number(text, event.block);
  text += ',';
  append_number(text, event.num_bytes);
  text.append(",").append(*event.op).append(",");
  append_seconds(text, event.time);
  text += ',';
  append_number(text, event.layer);
  text.append(",").append(*event.name).append("]");
}

}  // namespace hybridpar
