"""The words that made-up systems and questions are put together from."""

from __future__ import annotations


def listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


NOUNS = listed(
    "queue, buffer, session, channel, segment, block, replica, partition, index, snapshot, lease,"
    "token, route, link, port, socket, frame, packet, batch, record, table, cursor, worker, task,"
    "job, pool, cache, shard, volume, disk, sector, page, region, zone, cluster, node, peer, leader,"
    "quorum, ledger, journal, backup, archive, tape, image, container, mount, handle, lock, timer,"
    "watchdog, heartbeat, clock, certificate, key, policy, rule, filter, profile, account, license,"
    "schema, manifest, bundle, package, firmware, driver, module, plugin, sensor, actuator, valve,"
    "pump, motor, drive, gearbox, conveyor, burner, boiler, tank, feeder, silo, crane, turbine,"
    "inverter, breaker, relay, rectifier, battery, charger, fan, compressor, chiller, damper, meter,"
    "gateway, bridge, switch, antenna, beacon, tunnel, lane, gate, elevator, door, badge, camera,"
    "recipe, order, shipment, pallet, label, invoice, ticket, mailbox, message, topic, stream"
)
VERBS = listed(
    "accept, reject, open, close, start, restart, load, unload, flush, sync, allocate, release,"
    "register, attach, detach, mount, unmount, enqueue, resolve, verify, validate, schedule,"
    "dispatch, receive, deliver, forward, replicate, expire, evict, restore, resume, suspend, poll,"
    "probe, calibrate, purge, rotate, merge, balance, elect, promote, demote, update, renew, revoke,"
    "lock, unlock, scale, fetch, parse, encode, decode, compress, publish, acknowledge, invalidate,"
    "migrate, archive, index, inspect, throttle, negotiate, complete, abort, confirm, create, delete,"
    "configure, initialize, terminate, recover, reclaim, assign, select, discard, export"
)
ADJECTIVES = listed(
    "stale, remote, local, pending, primary, secondary, upstream, downstream, idle, inner, outer,"
    "shared, private, cold, warm, spare, orphaned, empty, full, partial, duplicate, late, early,"
    "active, passive, standby, virtual, physical, default, manual, automatic, temporary, corrupt,"
    "unknown, foreign, slow, fast, north, south, upper, lower, left, right, incoming, outgoing"
)
ADVERBS = listed(
    "successfully, again, now, normally, early, by policy, on demand, as requested, by operator,"
    "without change, in background, from cache, in order, after restart, at startup, within limits"
)
REASONS = listed(
    "timeout, connection reset, no route, permission denied, checksum mismatch, out of memory,"
    "limit exceeded, not found, already in use, bad state, version mismatch, no reply, queue full,"
    "invalid argument, lost quorum, disk full, overload, overtemperature, undervoltage, broken wire,"
    "parity error, short read, unexpected end, access violation, deadline passed, stale handle"
)
CONSEQUENCES = listed(
    "entering safe mode, falling back to, switching over to, giving up on, will retry, isolating,"
    "holding last value of, marking as failed, scheduling repair of, dropping, blocking, tripping,"
    "skipping, restarting, degrading, notifying owner of, discarding changes of, reverting to old"
)
PARTS = listed(
    "Manager, Service, Worker, Handler, Server, Client, Store, Monitor, Scheduler, Listener, Proxy,"
    "Agent, Router, Keeper, Loader, Writer, Reader, Factory, Engine, Controller, Tracker, Daemon"
)
STATES = tuple(
    tuple(group.split("/"))
    for group in listed(
        "UP/DOWN/DEGRADED, idle/running/stopped/faulted, OK/NOK, open/half_open/closed, true/false,"
        "MASTER/BACKUP/FAULT, Ready/NotReady/Unknown, green/yellow/red, AUTO/MANUAL/REMOTE, on/off,"
        "online/offline/draining, NEW/ACTIVE/DONE/FAILED, GOOD/BAD/UNCERTAIN, enabled/disabled,"
        "LOOKING/FOLLOWING/LEADING, normal/warning/critical, passed/failed/skipped, full/partial"
    )
)
# name, unit, lowest and highest usual value, decimals
QUANTITIES: tuple[tuple[str, str, float, float, int], ...] = (
    ("temperature", "degC", 15, 95, 1), ("temp", "C", 30, 80, 0), ("pressure", "bar", 0.8, 16, 2),
    ("flow", "m3/h", 2, 120, 1), ("level", "%", 10, 95, 1), ("speed", "rpm", 300, 3000, 0),
    ("current", "A", 0.5, 60, 1), ("voltage", "V", 220, 405, 1), ("power", "kW", 1, 900, 1),
    ("frequency", "Hz", 49.8, 50.2, 3), ("vibration", "mm/s", 0.3, 7, 2), ("torque", "Nm", 5, 90, 1),
    ("humidity", "%RH", 20, 80, 1), ("load", "", 0.05, 9, 2), ("rssi", "dBm", -92, -40, 0),
    ("ph", "pH", 5.5, 8.5, 2), ("co2", "ppm", 400, 1200, 0), ("weight", "kg", 1, 800, 2),
    ("latency", "ms", 0.4, 90, 2), ("throughput", "MB/s", 1, 400, 1), ("rate", "/s", 2, 4000, 0),
    ("position", "mm", 0, 1500, 1), ("energy", "kWh", 100, 9000, 1), ("snr", "dB", 5, 40, 1),
    ("heap", "MB", 64, 4096, 0), ("offset", "us", -80, 80, 1), ("conductivity", "uS/cm", 50, 900, 0),
    ("wind", "m/s", 0, 18, 1), ("density", "g/cm3", 0.7, 1.4, 3), ("thickness", "um", 20, 300, 1),
)  # fmt: skip
UNICODE_UNITS = {"degC": "°C", "C": "°C", "m3/h": "m³/h", "us": "µs", "uS/cm": "µS/cm", "um": "µm"}
PREPOSITIONS = listed(
    "from, to, on, at, for, by, via, with, in, of, under, against, through, after"
)

TOPICS = listed(
    # plants
    "a centrifugal pump, a check valve, a heat exchanger, a steam boiler, a cooling tower,"
    "a conveyor belt, a PID controller, a pressure transmitter, a thermocouple, a flow meter,"
    "a level switch, an emergency stop, an interlock, a PLC, a SCADA system, a historian, an HMI,"
    "a frequency converter, a servo drive, a gearbox, a ball bearing, cavitation, water hammer,"
    "a safety valve, a filter press, a distillation column, a bioreactor, a clean room, a CNC mill,"
    "a robot arm, a hydraulic press, a compressor, compressed air, a dust filter, an alarm flood,"
    "preventive maintenance, a shift handover, lockout and tagout, a spare part, a weighing scale,"
    # networks
    "a network switch, a router, a firewall, a VLAN, a subnet mask, DNS, DHCP, NAT, a VPN, ARP, TCP,"
    "UDP, TLS, a MAC address, Modbus, OPC UA, MQTT, PROFINET, CAN bus, EtherCAT, a proxy server,"
    "a load balancer, packet loss, jitter, latency, Wi-Fi roaming, optical fibre, NTP, syslog, SNMP,"
    # electricity
    "a transformer, a circuit breaker, a fuse, a contactor, a relay, a capacitor, an inductor,"
    "a diode, a transistor, three-phase power, reactive power, power factor, earthing, a battery,"
    "a solar panel, a wind turbine, an inverter, a UPS, a smart meter, an electric motor, a substation,"
    "an arc flash, a short circuit, insulation resistance, a residual current device, a stepper motor,"
    "harmonics, the grid frequency, a generator, a charging station, an oscilloscope, Ohm's law,"
    # software
    "a hash table, a linked list, binary search, recursion, a database index, a transaction,"
    "a deadlock, a race condition, garbage collection, a compiler, an interpreter, version control,"
    "a unit test, continuous integration, a container, a virtual machine, a message queue, a cache,"
    "a REST API, JSON, YAML, regular expressions, a state machine, logging levels, a watchdog timer,"
    "an operating system, a file system, a cron job, a memory leak, a stack overflow, encryption,"
    "a password manager, two-factor login, a backup strategy, a checksum, a rollback, machine learning,"
    # everyday life
    "a bicycle, a garden, a kitchen knife, sourdough bread, a cup of tea, a rainy Sunday, a cat,"
    "an old lighthouse, a train journey, a village market, a birthday party, a lost key, a neighbour,"
    "a first day at work, a school trip, a mountain hut, a small bakery, a library, a river, the moon,"
    "a thunderstorm, a chess game, a violin, a football match, a house plant, a used car, a rented flat,"
    "a dentist appointment, a job interview, a bus strike, a weekend in Lisbon, an apple tree,"
    "a broken window, a museum, a grandmother, a fishing boat, a winter coat, a recipe for soup"
)
AUDIENCES = listed(
    "a new operator, an apprentice, a child of ten, a manager, an electrician, a student, a customer,"
    "a colleague from another department, someone without technical training, an experienced engineer,"
    "a maintenance technician, my grandfather, a journalist, a beginner, the night shift"
)
LIMITS = listed(
    "Be brief., Answer in one sentence., Answer in two sentences., Use at most 50 words.,"
    "Use at most 100 words., Use simple words., Give three points., Give five bullet points.,"
    "Use a table., Write plain text only., Give an example., Include one number., Explain why.,"
    "Start with the most important point., No introduction please., Write one paragraph."
)
EVENTS = listed(
    "error, warning, alarm, restart, timeout, connection, disconnect, retry, failed login, trip,"
    "state change, session, job, limit violation, configuration change, stack trace, lost message,"
    "repeated line, slow operation, unusual value, acknowledgement, transfer, new device"
)
THINGS = listed(
    "component, host, unit, device, user, process, address, module, subsystem, tag, job, service"
)
LOG_NAMES = listed(
    "this log, the log above, these lines, the extract, the messages above, this part of the log,"
    "the journal above, this trace, the output above, the lines before this question"
)
JSON_KEYS = listed(
    "time, source, level, message, count, host, id, first_seen, last_seen, severity, duration, cause"
)
CONVERSIONS = listed(
    "bar/psi, degrees Celsius/Fahrenheit, kilowatt hours/megajoules, horsepower/kilowatts,"
    "litres per minute/cubic metres per hour, miles/kilometres, inches/millimetres, pounds/kilograms,"
    "gallons/litres, knots/metres per second, mebibytes/megabytes, rpm/radians per second,"
    "newton metres/foot pounds, pascals/millibars, hours/seconds, square feet/square metres"
)
LANGUAGES = listed("Python, C, Rust, JavaScript, Go, SQL, Bash, Java, structured text, Lua")
PROGRAMS = listed(
    "reverses a string, counts the words of a file, finds the largest value of a list, parses a date,"
    "computes a moving average, reads a CSV file, removes duplicates, sorts records by time,"
    "converts hex to decimal, retries a request three times, checks whether a number is prime,"
    "merges two sorted lists, validates an IP address, computes a CRC, limits a value to a range,"
    "flattens a nested list, prints a table, measures elapsed time, rotates a log file"
)
