// Lines on stderr for the person who runs the job. Level from TORCH_IROH_LOG (error, warn, info, debug; default warn).
// Never give it a secret: nothing here redacts.
#pragma once

#include <cstdint>
#include <string>

namespace torch_iroh {

enum class LogLevel : std::uint8_t { error, warn, info, debug };

bool log_enabled(LogLevel level);
void log(LogLevel level, const std::string& text);

// Says `text` the first time this process meets `key`; keeps at most a thousand keys and then stays silent.
void log_once(LogLevel level, const std::string& key, const std::string& text);

}  // namespace torch_iroh
