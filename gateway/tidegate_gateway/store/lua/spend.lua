-- Books tokens for a tenant (a leaky bucket of one minute). Answers 0, or the milliseconds until it may come again.
--
-- KEYS: 1 the instant at which the bucket is empty again; 2 the answer to this very command, which may be sent twice over a
--       broken connection.
-- ARGV: 1 tokens (negative: given back), 2 tokens a minute, 3 '1' if they are used already and are always booked.

local answered = redis.call('GET', KEYS[2])
if answered then return tonumber(answered) end

local function answer(wait_ms)
  redis.call('SET', KEYS[2], wait_ms, 'PX', 10000)
  return wait_ms
end

local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local empty_ms = math.max(tonumber(redis.call('GET', KEYS[1]) or 0), now_ms)
local cost_ms = math.ceil(ARGV[1] * 60000 / ARGV[2])
if ARGV[3] == '1' then
  empty_ms = math.max(empty_ms + cost_ms, now_ms)
  redis.call('SET', KEYS[1], empty_ms, 'PX', empty_ms - now_ms + 1000)
  return answer(0)
end
-- An empty bucket takes any call, however large: it could never come in otherwise.
if empty_ms > now_ms and empty_ms + cost_ms - now_ms > 60000 then
  return answer(math.max(1, empty_ms + math.min(cost_ms, 60000) - now_ms - 60000))
end
redis.call('SET', KEYS[1], empty_ms + cost_ms, 'PX', empty_ms + cost_ms - now_ms + 1000)
return answer(0)
