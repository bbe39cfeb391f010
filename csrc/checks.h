// Refusals of arguments that do not fit, whose messages name the op. No torch in here.

#pragma once

#include <sstream>
#include <stdexcept>

namespace plait {

template <class... Parts>
[[noreturn]] void refuse(const char* op, const Parts&... parts) {
  std::ostringstream message;
  message << "plait::" << op << ": ";
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

template <class... Parts>
void check(bool holds, const char* op, const Parts&... parts) {
  if (!holds) refuse(op, parts...);
}

}  // namespace plait
