-- The exchange between the gateways of a pool. One exchange renews the caller's lease, publishes its backlogs, and answers
-- everything that it must know of the others.
--
-- KEYS: 1 leases (gateway -> instant at which it counts as dead), 2 backlogs (gateway -> JSON), 3 policy
--       (override, steered -> JSON), 4 ids of cancelled workflows by instant, 5 the instant since which gateways have
--       exchanged without a gap, 6 ids of workflows in which the caller has calls, 7 what tenants have (gateway -> JSON).
-- ARGV: 1 the operation, 2 its arguments as JSON.

local leases, backlogs, policy, cancelled, steady, mine = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local tenants = KEYS[7]
local args = cjson.decode(ARGV[2])
local longest_ms = 8 * 24 * 3600 * 1000 -- the longest deadline or override, and a day
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)

local function policies()
  local found = {}
  for _, kind in ipairs({ 'override', 'steered' }) do
    local raw = redis.call('HGET', policy, kind)
    local value = raw and cjson.decode(raw)
    if value and (not value.until_ms or value.until_ms > now_ms) then
      value.left_ms = value.until_ms and value.until_ms - now_ms
      found[kind] = value
    elseif raw then
      redis.call('HDEL', policy, kind)
    end
  end
  return found
end

-- Removes what a gateway told of itself.
local function untell(gateway)
  redis.call('HDEL', backlogs, gateway)
  redis.call('HDEL', tenants, gateway)
end

-- Gateways whose leases expired. After a time without any exchange (the store was away, so all leases expired) no gateway
-- counts as dead for another lease: live gateways need time to renew theirs.
local function lapsed()
  local since_ms = tonumber(redis.call('GET', steady) or now_ms)
  redis.call('SET', steady, since_ms, 'PX', math.ceil(args.lease_ms / 2))
  local silent = redis.call('ZRANGEBYSCORE', leases, '-inf', now_ms, 'LIMIT', 0, 100)
  for _, gateway in ipairs(silent) do untell(gateway) end
  return now_ms - since_ms >= args.lease_ms and silent or {}
end

local operations = {}

function operations.sync()
  local before_ms = tonumber(redis.call('ZSCORE', leases, args.gateway) or 0)
  local others = redis.call('ZCARD', leases) - (before_ms > 0 and 1 or 0)
  redis.call('ZADD', leases, now_ms + args.lease_ms, args.gateway)
  redis.call('PEXPIRE', leases, longest_ms)
  redis.call('HSET', backlogs, args.gateway, cjson.encode(args.backlogs))
  redis.call('HSET', tenants, args.gateway, cjson.encode(args.tenants))
  local dead = lapsed()
  redis.call('PEXPIRE', backlogs, args.lease_ms)
  redis.call('PEXPIRE', tenants, args.lease_ms)
  redis.call('PEXPIRE', policy, longest_ms)
  local gateways = redis.call('ZCOUNT', leases, now_ms, '+inf')
  local function of_others(key)
    local found, all = {}, redis.call('HGETALL', key)
    for i = 1, #all, 2 do
      if all[i] ~= args.gateway then found[#found + 1] = cjson.decode(all[i + 1]) end
    end
    return found
  end
  -- Cancelled since the last exchange: a little overlap costs nothing, a gap would lose one. When there are more than fit,
  -- the next exchange goes on from the last one of this answer.
  -- A gateway that has just started has no older calls.
  local ids, since_ms = {}, now_ms - 2000
  local first_ms = args.since_ms > 0 and args.since_ms or since_ms
  local found = redis.call('ZRANGEBYSCORE', cancelled, first_ms, '+inf', 'WITHSCORES', 'LIMIT', 0, args.most)
  for i = 1, #found, 2 do ids[#ids + 1] = found[i] end
  if #ids == args.most then since_ms = tonumber(found[#found]) end
  return cjson.encode({
    others = of_others(backlogs), tenants = of_others(tenants), gateways = gateways, dead = dead, policy = policies(),
    cancelled = ids, since_ms = since_ms, now_ms = now_ms, lease_before_ms = before_ms, others_before = others,
  })
end

-- A gateway that owes nothing is gone; one that leaves calls behind is dead at once, so that they are forgotten.
function operations.leave()
  untell(args.gateway)
  if redis.call('EXISTS', mine) == 1 then
    redis.call('ZADD', leases, now_ms, args.gateway)
  else
    redis.call('ZREM', leases, args.gateway)
  end
  return '{}'
end

-- A dead gateway whose calls have all been forgotten.
function operations.bury()
  local lease = redis.call('ZSCORE', leases, args.gateway)
  if lease and tonumber(lease) <= now_ms then redis.call('ZREM', leases, args.gateway) end
  return '{}'
end

function operations.set_policy()
  if args.policy then
    redis.call('HSET', policy, args.kind, cjson.encode({
      policy = args.policy, reason = args.reason, since_ms = now_ms, alternatives = args.alternatives, expected = args.expected,
      until_ms = args.for_ms and now_ms + args.for_ms or nil,
    }))
    redis.call('PEXPIRE', policy, longest_ms)
  else
    redis.call('HDEL', policy, args.kind)
  end
  return cjson.encode(policies())
end

return operations[ARGV[1]]()
