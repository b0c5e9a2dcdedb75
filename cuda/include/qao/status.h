// What every function of the C++ API returns. Nothing under cuda/ or csrc/cpu/ throws: csrc turns a failed Status into
// a Python exception that also names the tensors involved.
#pragma once

#include <string>
#include <utility>

namespace qao {

class Status {
 public:
  Status() = default;
  static Status error(std::string message) {
    Status status;
    status.message_ = std::move(message);
    return status;
  }

  bool ok() const { return message_.empty(); }
  const std::string& message() const { return message_; }

 private:
  std::string message_;  // empty: success
};

}  // namespace qao
